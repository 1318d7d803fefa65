"""Recipe section `alerts`."""

from typing import Literal

from areal_hpc.recipe.base import BaseConfig

AlertName = Literal[
    "no_signal",
    "reward_drop",
    "engine_mismatch",
    "failing_agents",
    "low_entropy",
    "reply_length",
    "repetition",
    "cut_replies",
    "unrewarded_replies",
    "full_disk",
    "slow_cell",
]
"""Rules of `areal_hpc/metrics/alerts.py`."""


class AlertsConfig(BaseConfig):
    """Rules by which a run is judged after each step.

    A failure makes `areal-hpc status` exit with 1, a note is only told (docs/metrics.md).
    """

    off: tuple[AlertName, ...] = ()
    """Rules that are not asked."""
