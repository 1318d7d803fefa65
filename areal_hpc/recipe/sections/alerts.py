"""Recipe section `alerts`."""

from typing import Annotated

from pydantic import Field

from areal_hpc.recipe.base import BaseConfig

Share = Annotated[float | None, Field(gt=0, le=1)]


class AlertsConfig(BaseConfig):
    """Rules by which a run is judged after each step; null switches a rule off.

    A failure makes `areal-hpc status` exit with 1, a note is only told (docs/metrics.md).
    """

    command: tuple[str, ...] = ()
    """Program and arguments started once for each new alert, which AREAL_HPC_ALERT_* describe."""
    no_signal_steps: Annotated[int | None, Field(ge=1)] = 3
    """Failure: so many steps in a row have no gradient, or `max_zero_variance` is reached."""
    max_zero_variance: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of groups without an advantage from which on a step teaches nothing."""
    max_reward_drop_std: Annotated[float | None, Field(gt=0)] = 3.0
    """Failure: the reward fell by so many standard deviations of the 20 steps before."""
    max_engine_trainer_diff: Annotated[float | None, Field(gt=0)] = 0.1
    """Failure: mean difference (nats) of engine's and trainer's log-probabilities above this."""
    max_failed_episodes: Share = 0.5
    """Failure: the share of episodes' tries since the step before that failed is above this."""
    min_entropy: Annotated[float | None, Field(gt=0)] = 0.05
    """Note: mean entropy (nats) of sampled tokens below this."""
    max_reply_length_ratio: Annotated[float | None, Field(gt=1)] = 2.0
    """Note: replies are so many times longer, or shorter, than in the 20 steps before."""
    max_repeated_fraction: Share = 0.5
    """Note: share of repetition at the end of replies above this."""
    max_cut_fraction: Share = 0.25
    """Note: share of replies that reached their limit of tokens above this."""
    min_free_disk_gib: Annotated[float | None, Field(gt=0)] = 2.0
    """Note: less is free on the storage of the run directory."""
    min_cell_speed_ratio: Share = 0.5
    """Note: the slowest cell generates at less than this share of the fastest one's speed."""
