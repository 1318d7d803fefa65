"""The documents are true where a machine can tell: links, paths, commands, words."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.cli.main import main
from tests.support.environments import CHECKOUT
from tests.support.package_sources import PACKAGE, sources

SKIPPED = {".venvs", ".git", ".pytest_cache", "runs"}

DOCUMENTS = sorted(
    path for path in CHECKOUT.rglob("*.md") if not SKIPPED & set(path.relative_to(CHECKOUT).parts)
)
DECISIONS = sorted((CHECKOUT / "docs" / "decisions").glob("*.md"))
GLOSSARY = (CHECKOUT / "docs" / "glossary.md").read_text()
ARCHITECTURE = (CHECKOUT / "docs" / "architecture.md").read_text()
TABLES_OF_NAMES = "0028-names.md"
SECTIONS = ["Context", "Decision", "Consequences", "What would change our mind"]

FOLDERS = (
    *("areal_hpc", "benchmarks", "docs", "examples", "recipes"),
    *("requirements", "scripts", "slurm", "tests"),
)


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def anchors(document: Path) -> set[str]:
    """The fragments that headings of a document can be linked by."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


def code_of(document: Path) -> str:
    """Its code blocks and, a line each, its code spans."""
    text, fence = document.read_text(), re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
    return "\n".join([*fence.findall(text), *re.findall(r"`([^`\n]+)`", fence.sub("", text))])


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{target} does not exist"
        if fragment:
            assert fragment in anchors(linked), f"{target} names no heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_named_as_code_exist(document: Path) -> None:
    below = rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)"
    named = {path.rstrip("./") for path in re.findall(below, code_of(document))}
    assert [path for path in sorted(named) if not any(CHECKOUT.glob(path))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_named_as_code_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^\s*(?:\$ )?make ([a-z0-9-]+)", code_of(document), re.MULTILINE)
    assert targets.issuperset(named)


COMMANDS = {
    found
    for document in DOCUMENTS
    for found in re.findall(r"(?:^|/|\$ )areal-hpc((?: [a-z]+(?= |$))+)", code_of(document), re.M)
}
"""The `areal-hpc` subcommands that documents show, such as ` shards verify`."""
RUN_ELSEWHERE = {
    f" bench {name}" for name in ("checkpoint", "packing", "proxy", "shards", "trainer", "weights")
}
"""Other tests run these benchmarks: to ask each for its help takes seconds, and proves less."""


@pytest.mark.parametrize("command", sorted(COMMANDS - RUN_ELSEWHERE), ids=str.strip)
def test_commands_named_as_code_exist(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["areal-hpc"])
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    assert capfd.readouterr().out.startswith(f"usage: areal-hpc{command}")


def split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def words() -> dict[str, list[str]]:
    """Of the glossary, each with those that we do not use for it."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| .+? \| (.*?) ?\|$", GLOSSARY, re.MULTILINE)
    return {word: split(others) for word, others in rows}


def test_the_glossary_is_sorted_and_says_each_word_once() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)
    assert len(rows) > 20
    assert rows == sorted(set(rows))
    assert rows == list(words())


def test_every_word_of_the_glossary_is_used_in_the_package() -> None:
    source = "\n".join(sources().values()).lower()
    unused = [
        word
        for word in words()
        if not re.search(rf"\b{'[-_ ]?'.join(re.split('[- ]', word.lower()))}", source)
    ]
    assert unused == []


def names_in(source: str) -> Iterator[str]:
    """Every name that a module defines or binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def replaced_names(module: str, source: str) -> set[str]:
    """Names of a module, its own included, that hold a word which the glossary replaces."""
    listed = re.search(r"other\s+words for: ([\w,\s]+)\.", GLOSSARY)
    assert listed
    replaced = set(split(listed[1])).union(*words().values())
    return {
        name
        for name in {Path(module).stem, *names_in(source)}
        if replaced & {*re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")}
    }


def test_nothing_is_named_by_a_word_the_glossary_replaces() -> None:
    found = {module: replaced_names(module, text) for module, text in sources().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_replaced_word_is_found_in_any_name() -> None:
    source = "class CommitStore:\n    fate: str\n    def f(self, swap): self._custody = 1"
    found = replaced_names("view/pulse.py", source)
    assert found == {"CommitStore", "_custody", "fate", "pulse", "swap"}


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("decision", DECISIONS, ids=name_of)
def test_a_decision_is_one_page_with_the_four_sections(decision: Path) -> None:
    text = decision.read_text()
    assert text.startswith(f"# {int(decision.name[:4]):04d}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert decision.name == TABLES_OF_NAMES or len(text.splitlines()) <= 60


def test_every_package_has_its_line_in_the_architecture() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/`", ARCHITECTURE, re.MULTILINE)) == packages


def test_each_walk_names_every_file_once_and_all_exist() -> None:
    walks = ARCHITECTURE.split("## Three walks")[1].split("\n## ")[0].split("### ")[1:]
    for walk in walks:
        files = re.findall(r"`([\w/]+\.py)`", walk)
        assert len(files) == len(set(files)) > 20, walk.partition("\n")[0]
        assert [path for path in files if not (PACKAGE / path).exists()] == []


def test_the_guide_for_coding_agents_is_short() -> None:
    assert len((CHECKOUT / "AGENTS.md").read_text().splitlines()) <= 80
