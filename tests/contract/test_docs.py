"""The documents are true where a machine can tell: links, paths, commands, words."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.cli.main import main
from tests.support.environments import CHECKOUT

PACKAGE = CHECKOUT / "areal_hpc"
SKIPPED = {".venvs", ".git", ".pytest_cache", "runs"}

DOCUMENTS = sorted(
    path for path in CHECKOUT.rglob("*.md") if not SKIPPED & set(path.relative_to(CHECKOUT).parts)
)
DECISIONS = sorted((CHECKOUT / "docs" / "decisions").glob("*.md"))
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


def fences(document: Path) -> str:
    return "\n".join(re.findall(r"^```.*?\n(.*?)^```", document.read_text(), re.M | re.S))


def code_spans(document: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", prose)


def repository_paths(text: str) -> Iterator[str]:
    """What reads like a path below one of the checkout's folders."""
    for found in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)", text):
        yield found.rstrip(".")


def is_there(path: str) -> bool:
    return any(CHECKOUT.glob(path.rstrip("/"))) if "*" in path else (CHECKOUT / path).exists()


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
    named = {
        path
        for text in (fences(document), *code_spans(document))
        for path in repository_paths(text)
    }
    assert sorted(path for path in named if not is_there(path)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_named_as_code_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    lines = [*fences(document).splitlines(), *code_spans(document)]
    named = {match[1] for line in lines if (match := re.match(r"\s*(?:\$ )?make ([a-z]+)", line))}
    assert named <= targets


def commands(document: Path) -> set[tuple[str, ...]]:
    """The `areal-hpc` subcommands that a document shows, such as `("shards", "verify")`."""
    shown = "\n".join([fences(document), *code_spans(document)])
    return {
        tuple(found.split())
        for found in re.findall(r"(?:^|/|\$ )areal-hpc((?: [a-z]+(?= |$))+)", shown, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "command",
    sorted({found for document in DOCUMENTS for found in commands(document)}),
    ids=" ".join,
)
def test_commands_named_as_code_exist(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["areal-hpc"])
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--help"])
    assert leaving.value.code == 0
    assert capfd.readouterr().out.startswith(f"usage: areal-hpc {' '.join(command)}")


def words() -> dict[str, tuple[str, list[str]]]:
    """Glossary: word -> (meaning, words we do not use for it)."""
    text = (CHECKOUT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| (.*?) ?\|$", text, re.MULTILINE)
    return {
        word: (meaning, [other.strip() for other in others.split(",") if other.strip()])
        for word, meaning, others in rows
    }


def test_the_glossary_is_sorted_and_says_each_word_once() -> None:
    text = (CHECKOUT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(rows) > 20
    assert rows == sorted(set(rows))
    assert rows == list(words())


def test_every_word_of_the_glossary_is_used_in_the_package() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py")).lower()
    unused = [
        word
        for word in words()
        if not re.search(rf"\b{'[-_ ]?'.join(re.split('[- ]', word.lower()))}", source)
    ]
    assert unused == []


def replaced_words() -> set[str]:
    """Those of the glossary's last column, and those that its first paragraph lists."""
    text = (CHECKOUT / "docs" / "glossary.md").read_text()
    listed = re.search(r"other\s+words for: ([\w,\s]+)\.", text)
    assert listed
    others = {other for _, others in words().values() for other in others}
    return others | {word.strip() for word in listed[1].split(",")}


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


def replaced_names(path: Path, source: str) -> list[str]:
    """Names of a module, its own included, that hold a word which the glossary replaces."""
    replaced = replaced_words()
    offences = []
    for name in {path.stem, *names_in(source)}:
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
        if replaced.intersection(parts):
            offences.append(f"{name_of(path)}: {name}")
    return sorted(offences)


def test_nothing_is_named_by_a_word_the_glossary_replaces() -> None:
    found = [replaced_names(path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    assert [offence for offences in found for offence in offences] == []


def test_a_replaced_word_is_found_in_any_name() -> None:
    source = "class CommitStore:\n    fate: str\n    def f(self, swap): self._custody = 1"
    found = replaced_names(PACKAGE / "pulse.py", source)
    names = [offence.partition(": ")[2] for offence in found]
    assert names == ["CommitStore", "_custody", "fate", "pulse", "swap"]


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
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/`", text, re.MULTILINE)) == packages


def test_each_walk_names_every_file_once_and_all_exist() -> None:
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    walks = text.split("## Three walks")[1].split("\n## ")[0].split("### ")[1:]
    for walk in walks:
        files = re.findall(r"`([\w/]+\.py)`", walk)
        assert len(files) == len(set(files)) > 20, walk.partition("\n")[0]
        assert [path for path in files if not (PACKAGE / path).exists()] == []


def test_the_guide_for_coding_agents_is_short() -> None:
    assert len((CHECKOUT / "AGENTS.md").read_text().splitlines()) <= 80
