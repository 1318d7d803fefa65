"""Tables in documents that programs write, between two marks of the document."""

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end of table -->"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines).replace(" --- ", "---")


def with_table(document: Path, name: str, table: str) -> str:
    """The document with another table between `<!-- table: NAME -->` and the end mark."""
    begin = f"<!-- table: {name} -->"
    before, found, rest = document.read_text().partition(begin)
    assert found, f"{document} has no {begin}"
    return f"{before}{begin}\n{table}\n{END}{rest.partition(END)[2]}"


def write_table(document: Path, name: str, table: str) -> None:
    """Put a table in the place of the one that is there."""
    document.write_text(with_table(document, name, table))
