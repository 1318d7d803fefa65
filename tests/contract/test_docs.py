"""Links, paths, make targets and commands in the documents exist."""

import re
from pathlib import Path

from tests.support.environments import CHECKOUT

SKIPPED = {".venvs", ".git", ".pytest_cache", "runs", "build", "site"}
DOCUMENTS = sorted(
    path for path in CHECKOUT.rglob("*.md") if not SKIPPED & set(path.relative_to(CHECKOUT).parts)
)
FOLDERS = "areal_hpc|benchmarks|docs|examples|recipes|requirements|scripts|slurm|tests"
PACKAGE = CHECKOUT / "areal_hpc"
PACKAGES = "|".join({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"slurm"})


def anchors(document: Path) -> set[str]:
    """Return the fragments by which links name headings of a document."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


def code_of(document: Path) -> str:
    """Return the document's code blocks and, a line each, its code spans."""
    text, fence = document.read_text(), re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
    return "\n".join([*fence.findall(text), *re.findall(r"`([^`\n]+)`", fence.sub("", text))])


def is_broken(link: str, document: Path) -> bool:
    path, _, fragment = link.partition("#")
    linked = (document.parent / path).resolve() if path else document
    return not linked.exists() or bool(fragment and fragment not in anchors(linked))


def test_links_paths_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for document in DOCUMENTS:
        code = code_of(document)
        links = re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", document.read_text())
        named = set(re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*)", code))
        gone = [path for path in sorted(named) if not any(CHECKOUT.glob(path.rstrip("./")))]
        modules = set(re.findall(rf"(?<![\w./-])((?:{PACKAGES})/[\w/]*\.py)", code))
        if document.parent.name != "decisions":  # which also tell of what was
            gone += [path for path in sorted(modules) if not (PACKAGE / path).exists()]
        make_targets = re.findall(r"^\s*(?:\$ )?make ([a-z0-9-]+)", code, re.MULTILINE)
        wrong += [(document.name, link) for link in links if is_broken(link, document)]
        wrong += [(document.name, path) for path in gone]
        wrong += [(document.name, f"make {name}") for name in make_targets if name not in targets]
    assert wrong == []
