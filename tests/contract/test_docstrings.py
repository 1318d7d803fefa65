"""A name in a docstring is one that the code still has: renames reach prose too."""

import ast
import builtins
import re
from collections.abc import Iterator

from tests.support.package_sources import sources

NAMES_OF_OTHERS = """
AHJ1 CONTAINER_PATH FloatTensor HOST_PATH InteractionCache PackedSeqParams SFT_JOBID Scheduler X
apply_reward_discount chat_template_utils cpu_has_amx_support huggingface_hub ib0
init_custom_process_group launch_failed_requeued_held on_ preexec_fn publish_load_snapshot
restart_00 step_00000040 tokenizer_manager tokenizers
"""
"""Of dependencies, Slurm and AReaL; and examples of names."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.value


def names_of(tree: ast.Module) -> set[str]:
    """Whatever the code of a file binds, reads, imports or holds in a string."""
    prose = {id(text) for text in docstrings(tree)}
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                found.update(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.update(re.findall(r"\w+", node.value))
    return found


def dead_names(tree: ast.Module, known: set[str]) -> list[str]:
    return [
        f"{text.lineno}: {name}"
        for text in docstrings(tree)
        for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`", str(text.value))
        if not known.issuperset(re.findall(r"\w+", name.removesuffix(".py")))
    ]


def test_docstrings_name_what_there_is() -> None:
    trees = {name: ast.parse(text) for name, text in sources().items()}
    known = {*dir(builtins), *NAMES_OF_OTHERS.split(), *re.findall(r"\w+", " ".join(trees))}
    known.update(*map(names_of, trees.values()))
    found = {name: dead_names(tree, known) for name, tree in trees.items()}
    assert not {name: dead for name, dead in found.items() if dead}


def test_a_name_that_is_gone_is_found() -> None:
    tree = ast.parse('"""See `rundir.paths`, `gone.paths`."""')
    assert dead_names(tree, {"rundir", "paths"}) == ["1: gone.paths"]
