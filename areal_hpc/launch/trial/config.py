"""Typed configuration of the process that plays trial episodes."""

from pathlib import Path

from areal_hpc.proxy.config import ProxyJobConfig
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.rollout.config import RolloutJobConfig


class TrialConfig(BaseConfig):
    """All that a trial needs to know. Replies are random unless one of the last two is given."""

    proxy: ProxyJobConfig
    driver: RolloutJobConfig
    recorded_run: Path | None = None
    """Run whose recorded replies are replayed."""
    base_url: str | None = None
    """Server that generates: SGLang, or one with OpenAI's legacy Completions."""
