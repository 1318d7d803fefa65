"""docs/parity.md: which layouts and families it speaks of, its bounds, how it is written and read.

The figures come from `tests/acceptance/test_parity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.support.environments import CHECKOUT
from tests.support.tables import markdown, write_table

DOCUMENT = CHECKOUT / "docs" / "parity.md"

DENSE = ("llama", "qwen2", "qwen3")
MIXTURE = "qwen3_moe"
FAMILIES = (*DENSE, MIXTURE)

LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
    "TP2 x PP2": {"tp": 2, "pp": 2},
    "TP2 x CP2": {"tp": 2, "cp": 2},
    "DP2, EP2": {"dp": 2, "ep": 2},
    "TP2, EP2": {"tp": 2, "ep": 2},
}
"""Parallel sizes by the name the document gives them. EP spreads ranks that are there anyway."""

RESUMES = (("TP2", "1"), ("1", "PP2"), ("DP2", "TP2"), ("DP2, EP2", "1"), ("1", "TP2, EP2"))
"""Layouts that a checkpoint is written and read under."""

LOGPROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
NORM_BOUND = 1e-5
RESUME_BOUND = 1e-6


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one layout is from transformers."""

    family: str
    layout: str
    logprob_gap: float
    gradient_gap: float
    norm_gap: float


@dataclass(frozen=True, slots=True)
class Resume:
    """How far the step after a resume is from the one without it."""

    family: str
    written_under: str
    read_under: str
    loss_gap: float
    weight_gap: float


def families_of(layout: str) -> tuple[str, ...]:
    """Expert parallelism is for mixtures only."""
    return (MIXTURE,) if "ep" in LAYOUTS[layout] else FAMILIES


def families_resumed(written_under: str, read_under: str) -> tuple[str, ...]:
    """Families that both layouts know."""
    return tuple(
        family for family in families_of(written_under) if family in families_of(read_under)
    )


def write(agreements: list[Agreement], resumes: list[Resume]) -> None:
    """Put both tables into the document."""
    agreed = [
        (one.family, one.layout, *_shown(one.logprob_gap, one.gradient_gap, one.norm_gap))
        for one in agreements
    ]
    header = ("family", "layout", "log-probs", "gradients", "norm")
    write_table(DOCUMENT, "agreements", markdown(header, agreed))
    resumed = [
        (one.family, one.written_under, one.read_under, *_shown(one.loss_gap, one.weight_gap))
        for one in resumes
    ]
    header = ("family", "saved under", "resumed under", "loss", "weights")
    write_table(DOCUMENT, "resumes", markdown(header, resumed))


def _shown(*gaps: float) -> list[str]:
    return [f"{gap:.1e}" for gap in gaps]


def parse(document: str) -> tuple[list[Agreement], list[Resume]]:
    """The rows of both tables."""
    first, _, second = document.partition("<!-- table: resumes -->")
    agreements = [
        Agreement(family, layout, *map(float, figures)) for family, layout, *figures in _rows(first)
    ]
    resumes = [
        Resume(family, written, read, *map(float, figures))
        for family, written, read, *figures in _rows(second)
    ]
    return agreements, resumes


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in FAMILIES:
            yield cells


def shortcomings(document: str) -> list[str]:
    """Rows that are missing, and figures beyond their bound or not numbers."""
    agreements, resumes = parse(document)
    named = {(row.family, row.layout) for row in agreements}
    resumed = {(row.family, row.written_under, row.read_under) for row in resumes}
    found = [
        f"no row for {family} under {layout}"
        for layout in LAYOUTS
        for family in families_of(layout)
        if (family, layout) not in named
    ]
    found += [
        f"no row for {family} from {pair[0]} to {pair[1]}"
        for pair in RESUMES
        for family in families_resumed(*pair)
        if (family, *pair) not in resumed
    ]
    for row in agreements:
        found += _beyond(
            f"{row.family} under {row.layout}",
            {
                "log-probs": (row.logprob_gap, LOGPROB_BOUND),
                "gradients": (row.gradient_gap, GRADIENT_BOUND),
                "norm": (row.norm_gap, NORM_BOUND),
            },
        )
    for one in resumes:
        found += _beyond(
            f"{one.family} from {one.written_under} to {one.read_under}",
            {
                "loss": (one.loss_gap, RESUME_BOUND),
                "weights": (one.weight_gap, RESUME_BOUND),
            },
        )
    return found


def _beyond(where: str, figures: Mapping[str, tuple[float, float]]) -> list[str]:
    return [
        f"{where}: {what} {value:.1e} is beyond {bound:g}"
        for what, (value, bound) in figures.items()
        if not value <= bound
    ]
