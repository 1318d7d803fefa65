"""Compare the figures of documents with benchmarks/results, where each names its file and key.

`0.55<!-- results: proxy.json cpu_us_1k * 0.001 -->` is `cpu_us_1k` of that file in thousandths,
to the decimals that are written. Keys within keys are separated by `/`. `--write` corrects what
differs.
"""

import re
import sys
from pathlib import Path
from typing import Any

from tests.support.environments import CHECKOUT
from tests.support.results import read_results
from tests.support.site.curve import CURVE, render_curve

SOURCE_MARK = re.compile(r"<!-- results: (\S+)\.json (.+?)(?: \* ([\d.]+))? -->")
_FIGURE = re.compile(r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)" + SOURCE_MARK.pattern)


def list_documents() -> list[Path]:
    return [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *(CHECKOUT / "docs").rglob("*.md")]


def look_up(name: str, key: str) -> float:
    value: Any = read_results(name, {})
    for part in key.split("/"):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return float(value)


def format_like(written: str, value: float) -> str:
    """The value with as many decimals as were written, with commas or an exponent if those were."""
    mantissa, _, exponent = written.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent:
        digits, _, power = f"{value:.{decimals}e}".partition("e")
        return f"{digits}e{int(power)}"
    return (
        f"{value:,.{decimals}f}"
        if "," in written or abs(value) >= 1000
        else f"{value:.{decimals}f}"
    )


def renew_figures(text: str) -> str:
    def renew(figure: re.Match[str]) -> str:
        written, name, key, factor = figure.groups(default="1")
        value = look_up(name, key) * float(factor)
        return f"{format_like(written, value)}{figure[0].removeprefix(written)}"

    return _FIGURE.sub(renew, text)


def main() -> int:
    count = 0
    current: dict[Path, str] = {CURVE: render_curve()}
    for document in list_documents():
        text = document.read_text()
        count += len(SOURCE_MARK.findall(text))
        current[document] = renew_figures(text)
    wrong = {path: text for path, text in current.items() if path.read_text() != text}
    for path, text in wrong.items():
        for old, new in zip(path.read_text().splitlines(), text.splitlines(), strict=False):
            if old != new:
                print(f"{path.relative_to(CHECKOUT)}:\n- {old}\n+ {new}")
        if "--write" in sys.argv:
            path.write_text(text)
    print(f"{count} figures of documents, {len(wrong)} documents differ from benchmarks/results")
    return 1 if wrong and "--write" not in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
