"""What the page of a trajectory shows of the trainer's annotations, by token of the row."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import (
    UNTRAINED_TOKEN_REASONS,
    RowAnnotation,
    find_row_annotation,
)

JsonObject = dict[str, Any]
_NUMBER_TYPE_BY_FIELD = (
    ("advantages", "<f2"),
    ("logprobs", "<f4"),
    ("entropies", "<f2"),
    ("ratios", "<f2"),
)


def describe_annotation(paths: RunPaths, row_description: Mapping[str, Any]) -> JsonObject | None:
    """The annotation of a row that is described with its step.

    None for a row that no batch has had, or that was not annotated.
    """
    step, shard, row = (row_description[name] for name in ("step", "shard", "row"))
    if step is None:
        return None
    annotation = find_row_annotation(paths, step, shard, row)
    if annotation is None:
        return None
    return {"step": step} | build_token_columns(annotation, row_description["tokens"]["mask"])


def build_token_columns(annotation: RowAnnotation, mask: Sequence[int]) -> JsonObject:
    """An annotation as columns of the row's tokens: null where nothing is known. Pure."""
    places = np.flatnonzero(np.asarray(mask) == 1)
    columns: JsonObject = {
        name: _scatter_to_token_places(
            np.frombuffer(getattr(annotation, name), kind), places, len(mask)
        )
        for name, kind in _NUMBER_TYPE_BY_FIELD
    }
    codes = _scatter_to_token_places(np.frombuffer(annotation.reasons, np.uint8), places, len(mask))
    columns["reasons"] = [UNTRAINED_TOKEN_REASONS[int(one)] if one else "" for one in codes]
    return {"outcome": annotation.outcome, "advantage": annotation.advantage, **columns}


def _scatter_to_token_places(
    values: npt.NDArray[Any], places: npt.NDArray[np.int64], size: int
) -> list[float | None]:
    column: list[float | None] = [None] * size
    if len(values) == len(places):  # a row that was left out has none
        for place, value in zip(places.tolist(), values.astype(float).tolist(), strict=True):
            column[place] = round(value, 5) if math.isfinite(value) else None
    return column
