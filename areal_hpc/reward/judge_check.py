"""Agreement of a judging model with labels of people."""

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
"""Replies on which judge and label differ most."""
MAX_PROBLEMS = 10


class LabeledReply(Struct, frozen=True):
    """A line of a file of labels."""

    question: str
    reply: str
    label: float
    """Its worth by a person's word, from 0 to 1."""
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a judge's values agree with labels of people, both from 0 to 1."""

    count: int
    mean_difference: float
    """Judge minus label: above 0 the judge is too kind."""
    mean_abs_difference: float
    rank_correlation: float
    """Spearman's; NaN where all values, or all labels, are equal."""
    kappa: float
    """Cohen's, of good (at least the threshold) and bad; NaN where all are one of them."""


def measure_agreement(
    values_N: Sequence[float], labels_N: Sequence[float], threshold: float = 0.5
) -> Agreement:
    """How far values agree with labels. Pure."""
    values, labels = np.asarray(values_N, dtype=np.float64), np.asarray(labels_N, dtype=np.float64)
    if values.shape != labels.shape or not values.size:
        raise ValueError(f"expected a label for each value, got {values.size} and {labels.size}")
    good, is_good = values >= threshold, labels >= threshold
    observed = float((good == is_good).mean())
    by_chance = float(good.mean() * is_good.mean() + (1 - good.mean()) * (1 - is_good.mean()))
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
    """Grade the replies of a file of labels; the agreement and the largest differences as text."""
    labeled = read_labels(path)
    grades = await asyncio.gather(
        *(judge(one.question, one.reply, one.reference) for one in labeled)
    )
    labels = [one.label for one in labeled]
    found = measure_agreement([one.value for one in grades], labels, threshold)
    return "\n".join(
        [*_format_agreement(found, threshold), *_format_largest_differences(labeled, grades)]
    )


def read_labels(path: Path) -> list[LabeledReply]:
    """The labeled replies of a JSON-lines file."""
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
            one = decode_json(line, LabeledReply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(Problem(f"line {number}: {error}", str(path)))
            continue
        if 0 <= one.label <= 1:
            labeled.append(one)
        else:
            problems.append(Problem(f"line {number}: label is {one.label}, not 0 to 1", str(path)))
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
        zip(labeled, grades, strict=True), key=lambda one: -abs(one[1].value - one[0].label)
    )
    lines = []
    for one, grade in pairs[:MAX_SHOWN_REPLIES]:
        if grade.value != one.label:
            lines += [
                f"judge {grade.value:.2f}, label {one.label:.2f}: {one.reply!r:.100}",
                f"    {grade.explanation!r:.150}",
            ]
    return lines
