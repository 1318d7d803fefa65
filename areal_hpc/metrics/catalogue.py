"""The metrics of a step, which `catalogue.yaml` lists with units, meanings and sources."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a step. A name that ends in `<name>` stands for any number of metrics."""

    name: str
    unit: str
    """Empty for a plain number; `share` is a number from 0 to 1."""
    direction: str
    """Where a healthy run goes: `up`, `down`, `steady`, or `-` if it says nothing of health."""
    meaning: str
    """The formula, or what is counted."""
    source: str
    """What it is computed from. A replay of a batch finds `batch`, `records` and `loss` again."""


@cache
def read_catalogue() -> tuple[Metric, ...]:
    groups = yaml.safe_load((resources.files("areal_hpc.metrics") / "catalogue.yaml").read_text())
    return tuple(
        Metric(name, unit, direction, meaning, group["from"])
        for group in groups
        for name, (unit, direction, meaning) in group["metrics"].items()
    )


@cache
def find_metric(metric_name: str) -> Metric | None:
    for metric in read_catalogue():
        pattern = re.escape(metric.name).replace("<name>", ".+")
        if re.fullmatch(pattern, metric_name):
            return metric
    return None
