"""An answer about a run: a headline, sentences with their numbers, and pages that show them."""

from dataclasses import dataclass
from urllib.parse import quote, urlencode

from areal_hpc.errors import escape_line


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    page: str = ""
    """What stands behind the address of the dashboard; empty without a page."""


@dataclass(frozen=True, slots=True)
class Answer:
    headline: str
    findings: tuple[Finding, ...] = ()
    hints: tuple[str, ...] = ()
    """What to try, the most promising first."""
    table: tuple[str, ...] = ()
    is_well: bool = True


def build_page_url_fragment(page: str, run: str, **query: str) -> str:
    return f"#/{page}?{urlencode({'run': run, **query}, quote_via=quote)}"


def format_answer(answer: Answer, run: str) -> list[str]:
    lines = [answer.headline]
    for finding in answer.findings:
        lines.append(f"  {finding.text}")
        if finding.page:
            lines.append(f"    {finding.page}")
    lines += [f"  {line}" for line in answer.table]
    lines += [f"try: {hint.replace('RUN', run)}" for hint in answer.hints]
    if any(finding.page for finding in answer.findings):
        lines.append(f"pages: areal-hpc view {run} prints an address; #/... goes behind it")
    return [escape_line(line) for line in lines]
