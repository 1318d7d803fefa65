"""The run directory has one owner: only `areal_hpc/rundir/` spells the names inside it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.rundir import checkpoint_index, checkpoints, rendezvous
from areal_hpc.rundir.paths import (
    HELD_JOB_NOTES_SUBDIR,
    JobPaths,
    RunPaths,
    format_restart_dir,
    format_step_dir,
)
from tests.support.package_sources import sources

RUN, JOB = RunPaths(Path("run")), JobPaths(Path("job"))

FIXED = {one.name for kind in (RunPaths, JobPaths) for one in vars(kind).values() if
         type(one).__name__ == "_PathDescriptor"}  # fmt: skip
NAMES = {part for name in FIXED for part in name.split("/")} | {
    HELD_JOB_NOTES_SUBDIR, checkpoints.COMPLETE_MARKER_FILE, checkpoints.TRAINER_STATE_FILE,
    checkpoint_index.CHECKPOINT_INDEX_FILE,
    RUN.export_dir("x").parent.name, rendezvous.LEDGER_SERVICE, rendezvous.RANK_STORE_SERVICE,
    rendezvous.EVALUATION_CELL,
}  # fmt: skip
"""Every name of a file, a folder or a service: `manifests`, `COMPLETE`, `launch.json`..."""
UNMISTAKABLE = {name for name in NAMES if not re.fullmatch(r"[a-z]+", name)}
"""Those that mean nothing else; the others are words too, and count where they make a path."""
OTHER_MEANINGS = {
    ("sandbox/images/oci_image.py", "index.json"),  # of the OCI image layout
    ("slurm/states.py", "CANCELLED"),  # Slurm's states
    ("view/diagnosis.py", "CANCELLED"),
    ("view/diagnosis.py", "CANCELLED AT"),
    ("view/state/summary.py", "tensorboard"),  # the program
}

PREFIXES = {
    rendezvous.CELL_PREFIX,
    *(numbered.rstrip("0") for numbered in (
        rendezvous.format_proxy_name("0"), rendezvous.format_control_proxy_name("0"),
        format_step_dir(0), format_restart_dir(0), RUN.log_dir(0).name, RUN.manifest(0).stem,
        RUN.replaced_recipe(0).stem, checkpoint_index.get_rank_file_path(Path(), 0).stem,
        JOB.task_exit(0).stem)),
}  # fmt: skip
"""What numbered names begin with: `cell-`, `control-`, `step_`, `task_exit.`..."""
_ANY_PREFIX = "|".join(map(re.escape, sorted(PREFIXES)))
PREFIX = re.compile(rf"(^|/)\.?({_ANY_PREFIX})+($|[\d*?{{%(\[\\])")
MAKES_A_PATH = {"glob", "rglob", "joinpath", "with_name", "with_suffix"}
FINDS_A_SERVICE = {
    "publish_endpoint",
    "find_endpoint",
    "wait_for_endpoint",
    "remove_own_endpoint",
    "Peer",
}


def texts_of(*nodes: ast.AST) -> dict[int, str]:
    """The strings that nodes are, or are put together from, by identity."""
    parts = (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {id(part): part.value for part in parts if isinstance(part.value, str)}


def spellings(source: str) -> Iterator[str]:
    """Every string in a program that spells a name of the run directory."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    in_paths: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            in_paths |= texts_of(node.right).keys()
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in MAKES_A_PATH | FINDS_A_SERVICE:
                in_paths |= texts_of(*node.args).keys()
    for identity, text in texts_of(tree).items():
        known = NAMES if identity in in_paths else UNMISTAKABLE
        spells = PREFIX.search(text) or not known.isdisjoint(re.split(r"[/\s]", text))
        if spells and identity not in documentation:
            yield text


def test_only_its_owner_spells_the_names_of_the_run_directory() -> None:
    found = {
        (module, text)
        for module, source in sources().items()
        if not module.startswith("rundir/")
        for text in spellings(source)
    }
    assert found - OTHER_MEANINGS == set(), "take it from areal_hpc.rundir"
    assert found >= OTHER_MEANINGS, "an exception that nothing needs"


@pytest.mark.parametrize(
    "mutation",
    [
        'marker = path / "COMPLETE"',
        'state = marker.with_name("trainer.json")',
        'folder = layout.root / "manifests"',
        'folder = layout.root / "jobs" / job / "held"',
        'for marker in directory.glob("step_*/COMPLETE"): pass',
        'path = f"{folder}/jobs/{job}/launch.json"',
        'events = open(os.path.join(run_dir, "events.jsonl"))',
        'name = f"control-{cell}"',
        'name = "proxy-cell-0"',
        'name = "cell-%d" % number',
        'endpoint = rendezvous.find_endpoint(layout.rendezvous_dir, "ledger")',
        'hint = "look at failures_without_progress.json"',
        'found = re.fullmatch(r"step_\\d+", name)',
    ],
)
def test_a_spelling_elsewhere_is_found(mutation: str) -> None:
    """In a real module, behind text that may say anything."""
    source = sources()["view/state/run_state.py"]
    talk = '\n"""Not a spelling: COMPLETE, control-0."""  # nor is "trainer.json"\n'
    assert list(spellings(source + talk)) == []
    assert list(spellings(f"{source}{talk}{mutation}\n"))


@pytest.mark.parametrize(
    "innocent", ['kind = "ledger"', 'word = "held"', 'keys = {"index": 0, "shards": 1}', "a / b"]
)
def test_a_word_that_makes_no_path_is_no_spelling(innocent: str) -> None:
    assert list(spellings(innocent)) == []
