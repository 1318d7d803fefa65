"""docs/parity.md: which layouts and families it speaks of, its bounds, how it is written and read.

The figures come from `tests/acceptance/test_parity.py`.
"""

from collections.abc import Mapping

from tests.support.environments import CHECKOUT
from tests.support.tables import markdown, write_table

DOCUMENT = CHECKOUT / "docs" / "parity.md"

MIXTURE = "qwen3_moe"
FAMILIES = ("llama", "qwen2", "qwen3", MIXTURE)

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
    "1, 3 layers": {"layers": 3},
    "PP2, 3 layers": {"pp": 2, "layers": 3},
}
"""Parallel sizes by the name the document gives them. EP spreads ranks that are there anyway."""

RESUMES = (
    *(("TP2", "1"), ("1", "PP2"), ("DP2", "TP2"), ("DP2, EP2", "1"), ("1", "TP2, EP2")),
    ("PP2, 3 layers", "1, 3 layers"),
)
"""Layouts that a checkpoint is written and read under."""

LOGPROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
NORM_BOUND = 1e-5
RESUME_BOUND = 1e-6

Row = tuple[str, ...]
"""What a row is of: its family, and the layouts that it compares."""


def families_of(*layouts: str) -> tuple[str, ...]:
    """Families that all of these know: expert parallelism is for mixtures only."""
    return (MIXTURE,) if any("ep" in LAYOUTS[layout] for layout in layouts) else FAMILIES


ROWS: dict[str, list[Row]] = {
    "agreements": [
        (family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if family in families_of(layout)
    ],
    "resumes": [(family, *pair) for pair in RESUMES for family in families_of(*pair)],
}
"""By table: the rows that it must have."""
HEADERS = {
    "agreements": ("family", "layout"),
    "resumes": ("family", "saved under", "resumed under"),
}
BOUNDS = {
    "agreements": {"log-probs": LOGPROB_BOUND, "gradients": GRADIENT_BOUND, "norm": NORM_BOUND},
    "resumes": {"loss": RESUME_BOUND, "weights": RESUME_BOUND},
}
"""By table and column: how far apart the two may be."""


def write(name: str, gaps: Mapping[Row, tuple[float, ...]]) -> None:
    """Put a table into the document."""
    rows = [(*row, *(f"{gap:.1e}" for gap in gaps[row])) for row in ROWS[name]]
    write_table(DOCUMENT, name, markdown((*HEADERS[name], *BOUNDS[name]), rows))


def shortcomings(document: str) -> list[str]:
    """Rows that are missing, and figures beyond their bound or not numbers."""
    agreements, _, resumes = document.partition("<!-- table: resumes -->")
    found = []
    for name, text in (("agreements", agreements), ("resumes", resumes)):
        width = len(HEADERS[name])
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n")]
        figures = {tuple(line[:width]): line[width:] for line in lines if line[0] in FAMILIES}
        found += [f"no row for {', '.join(row)}" for row in ROWS[name] if row not in figures]
        found += [
            f"{', '.join(row)}: {what} {figure} is beyond {bound:g}"
            for row, shown in figures.items()
            for figure, (what, bound) in zip(shown, BOUNDS[name].items(), strict=True)
            if not float(figure) <= bound
        ]
    return found
