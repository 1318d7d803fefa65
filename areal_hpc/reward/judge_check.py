"""Agreement of a judging model with labels of people (`areal-hpc check-judge`)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.reward.llm_judge import Grade, LlmJudge
from areal_hpc.wire.decoding import decode_json

MAX_SHOWN_REPLIES = 5
"""Number of replies shown on which judge and label differ most."""
MAX_PROBLEMS = 10


class LabeledReply(Struct, frozen=True):
    """Line of a file of labels."""

    question: str
    reply: str
    label: float
    """Value of the reply in a person's judgment, from 0 to 1."""
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measures of agreement of a judge's values with labels of people, both from 0 to 1."""

    count: int
    mean_difference: float
    """Judge minus label; above 0 the judge is too lenient."""
    mean_abs_difference: float
    rank_correlation: float
    """Spearman's correlation; NaN if all values, or all labels, are equal."""
    kappa: float
    """Cohen's kappa of good (at least the threshold) and bad; NaN if all are one of them."""


def measure_agreement(
    values_N: Sequence[float], labels_N: Sequence[float], threshold: float = 0.5
) -> Agreement:
    """Compute how far values agree with labels."""
    values, labels = np.asarray(values_N, dtype=np.float64), np.asarray(labels_N, dtype=np.float64)
    if values.shape != labels.shape or not values.size:
        raise ValueError(f"expected a label for each value, got {values.size} and {labels.size}")
    good, labeled = values >= threshold, labels >= threshold
    observed = float((good == labeled).mean())
    by_chance = float(good.mean() * labeled.mean() + (1 - good.mean()) * (1 - labeled.mean()))
    return Agreement(
        len(values),
        float((values - labels).mean()),
        float(np.abs(values - labels).mean()),
        _compute_pearson_correlation(_rank(values), _rank(labels)),
        (observed - by_chance) / (1 - by_chance) if by_chance < 1 else float("nan"),
    )


def _rank(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: np.ndarray[Any, np.dtype[np.float64]] = ends - (counts - 1) / 2
    return shared[inverse]


def _compute_pearson_correlation(
    first: np.ndarray[Any, np.dtype[np.float64]], second: np.ndarray[Any, np.dtype[np.float64]]
) -> float:
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


async def report_agreement(judge: LlmJudge, path: Path, threshold: float) -> str:
    """Grade the replies of a file of labels, and format the agreement and largest differences."""
    labeled = read_labels(path)
    grades = await asyncio.gather(
        *(judge(item.question, item.reply, item.reference) for item in labeled)
    )
    labels = [item.label for item in labeled]
    agreement = measure_agreement([grade.value for grade in grades], labels, threshold)
    return "\n".join(
        [*_format_agreement(agreement, threshold), *_format_largest_differences(labeled, grades)]
    )


def read_labels(path: Path) -> list[LabeledReply]:
    """Read the labeled replies of a JSON-lines file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        hint = "name a file of JSON lines"
        raise RecipeError(
            f"the labels cannot be read: {error}", key=str(path), hint=hint
        ) from error
    labeled, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            item = decode_json(line, LabeledReply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(Problem(f"line {number}: {error}", str(path)))
            continue
        if 0 <= item.label <= 1:
            labeled.append(item)
        else:
            problems.append(Problem(f"line {number}: label is {item.label}, not 0 to 1", str(path)))
    if problems:
        raise RecipeError.from_problems(problems[:MAX_PROBLEMS])
    if not labeled:
        hint = "write a JSON object with question, reply and label on each line"
        raise RecipeError("there is no label", key=str(path), hint=hint)
    return labeled


def _format_agreement(agreement: Agreement, threshold: float) -> list[str]:
    return [
        f"replies                   {agreement.count}",
        f"judge minus label, mean   {agreement.mean_difference:+.3f}",
        f"distance, mean            {agreement.mean_abs_difference:.3f}",
        f"rank correlation          {agreement.rank_correlation:.3f}",
        f"kappa, good from {threshold:g}      {agreement.kappa:.3f}",
    ]


def _format_largest_differences(
    labeled: Sequence[LabeledReply], grades: Sequence[Grade]
) -> list[str]:
    pairs = sorted(
        zip(labeled, grades, strict=True), key=lambda pair: -abs(pair[1].value - pair[0].label)
    )
    lines = []
    for item, grade in pairs[:MAX_SHOWN_REPLIES]:
        if grade.value != item.label:
            lines += [
                f"judge {grade.value:.2f}, label {item.label:.2f}: {item.reply!r:.100}",
                f"    {grade.explanation!r:.150}",
            ]
    return lines
