"""The catalogue has every metric that the package writes, and no other."""

import ast
import functools
import re
from collections.abc import Iterator

from areal_hpc.metrics.catalogue import find_metric, read_catalogue
from areal_hpc.metrics.step_metrics import STEP_PHASES
from tests.support.environments import CHECKOUT
from tests.support.package_sources import sources

NAMES = {metric.name for metric in read_catalogue()}
GROUPS = {name.split("/")[0] for name in NAMES if "/" in name}
WRITERS = ("evaluation/", "metrics/", "trainer/", "weights/")
"""Where metrics are measured and written."""
IS_NOT_WRITTEN = {"metrics/catalogue.py", "metrics/alerts.py"}
OF_SFT = {"tokens/targets", "throughput/trained_tokens_per_s"}
"""In `sft_metrics.jsonl`."""


def written_in(source: str) -> Iterator[re.Pattern[str]]:
    """What a module's strings look like; a value that is put into one may be anything."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
             for part in node.values}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[^/]+"
                for part in node.values
            ]
            yield re.compile("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield re.compile(re.escape(str(node.value)))


def is_metric(pattern: re.Pattern[str]) -> bool:
    """True if a string is a name in one of the catalogue's groups."""
    group, slash, rest = pattern.pattern.partition("/")
    return bool(slash) and group in GROUPS and re.fullmatch(r"[\w\[\]^/+.\\{}]+", rest) is not None


@functools.cache
def written() -> dict[str, list[re.Pattern[str]]]:
    return {
        module: list(written_in(source))
        for module, source in sources().items()
        if module.startswith(WRITERS) and module not in IS_NOT_WRITTEN
    }


def test_every_metric_that_is_written_is_in_the_catalogue() -> None:
    missing = {
        (module, pattern.pattern)
        for module, patterns in written().items()
        for pattern in filter(is_metric, patterns)
        if pattern.pattern not in OF_SFT
        and find_metric(pattern.pattern) is None
        and not any(pattern.fullmatch(name) for name in NAMES)
    }
    assert missing == set()


def test_every_metric_of_the_catalogue_is_written() -> None:
    texts = {pattern.pattern: pattern for found in written().values() for pattern in found}
    patterns = [one for text, one in texts.items() if "/" in text or "/" not in "".join(NAMES)]
    samples = {name.replace("<name>", "anything") for name in NAMES}
    assert {one for one in samples if not any(has.fullmatch(one) for has in patterns)} == set()


def test_each_says_what_it_is_and_every_phase_belongs_to_one_limit() -> None:
    for metric in read_catalogue():
        assert metric.meaning
    assert len(NAMES) == len(read_catalogue())
    phases = [f"time/{phase.name}_s" for phase in STEP_PHASES]
    assert sorted([*phases, "time/step_s"]) == sorted(n for n in NAMES if n.startswith("time/"))
    script = (CHECKOUT / "areal_hpc/view/dashboard/static/timeline.js").read_text()
    assert [one.name for one in STEP_PHASES if f" {one.name}: " not in script] == [], "its colors"
    assert find_metric("reward/part/format") is not None
    assert find_metric("reward/median") is None
