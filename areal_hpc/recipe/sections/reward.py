"""Recipe section `reward`."""

from typing import Literal

from areal_hpc.recipe.base import BaseConfig

ISOLATION_VARIABLE = "AREAL_HPC_REWARD_ISOLATION"
"""Environment variable that carries `reward.isolation` to the processes that reward."""


class RewardConfig(BaseConfig):
    """Rewards that run programs which the model wrote, others' scorers, gyms."""

    isolation: Literal["bwrap", "none"] = "bwrap"
    """How these are kept apart; `none`: they can read and change all that you can."""
