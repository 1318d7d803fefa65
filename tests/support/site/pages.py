"""Write the site's pages into build/docs, from which mkdocs makes the site.

These are the documents with their tables filled in, README first, and a page of each file of the
repository that one of them links.
"""

import os
import re
import shutil
from pathlib import PurePosixPath

from tests.support.environments import CHECKOUT
from tests.support.site.figures import SOURCE_MARK
from tests.support.site.tables import TABLES

PAGES_DIR = CHECKOUT / "build" / "docs"
TABLE_MARK = re.compile(
    r"^(?:`python [^`]*` prints this table\.\n\n)?<!-- table: (.+) -->$", re.MULTILINE
)
"""Mark of a table, with the sentence before it that only a reader of the checkout needs."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_COPIED = (".png", ".svg", ".css")


def place_in_site(path: PurePosixPath) -> PurePosixPath:
    """Path below build/docs of a file of the repository."""
    if path == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    if path.is_relative_to("docs"):
        return path.relative_to("docs")
    suffix = "" if path.suffix in (".md", *_COPIED) else ".md"
    return PurePosixPath("source", f"{path}{suffix}")


def find_linked_file(page: PurePosixPath, target: str) -> PurePosixPath | None:
    """Path in the repository; None of a folder without an index."""
    path = PurePosixPath(os.path.normpath(page.parent / target))
    if (CHECKOUT / path).is_dir():
        path = path / "index.md"
    return path if (CHECKOUT / path).is_file() else None


class Site:
    def __init__(self) -> None:
        self._waiting = [
            PurePosixPath(path.relative_to(CHECKOUT).as_posix())
            for path in [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.*"))]
        ]
        self._written: set[PurePosixPath] = set()

    def write(self) -> None:
        shutil.rmtree(PAGES_DIR, ignore_errors=True)
        while self._waiting:
            path = self._waiting.pop()
            if path not in self._written:
                self._written.add(path)
                self._write_page(path)

    def _write_page(self, path: PurePosixPath) -> None:
        source, target = CHECKOUT / path, PAGES_DIR / place_in_site(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in _COPIED:
            shutil.copyfile(source, target)
        elif path.suffix == ".md":
            target.write_text(self._render(path, source.read_text()))
        else:
            head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n"
            target.write_text(f"{head}\n~~~~{path.suffix[1:]}\n{source.read_text()}~~~~\n")

    def _render(self, path: PurePosixPath, text: str) -> str:
        text = TABLE_MARK.sub(lambda mark: TABLES[mark[1]](), SOURCE_MARK.sub("", text))
        pieces = _FENCE.split(text)
        pieces[::2] = [
            _LINK.sub(lambda link: self._render_link(path, link), piece) for piece in pieces[::2]
        ]
        return "".join(pieces)

    def _render_link(self, page: PurePosixPath, link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups(default="")
        linked = find_linked_file(page, target)
        if linked is None:
            return text
        self._waiting.append(linked)
        here = place_in_site(page).parent
        return f"{picture}[{text}]({os.path.relpath(place_in_site(linked), here)}{anchor})"


if __name__ == "__main__":
    Site().write()
