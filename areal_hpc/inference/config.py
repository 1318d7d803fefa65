"""Typed configuration of the inference process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from areal_hpc.jobs.config import JobConfig
from areal_hpc.recipe.sections.inference import InferenceConfig

FOLLOWER_ENTRY = "areal_hpc.inference.follower:run"
"""Parses the same configuration on the further nodes of a cell."""


class InferenceJobConfig(JobConfig):
    """What the launcher tells the inference process of one cell."""

    ENTRY = "areal_hpc.inference.job:run"
    ROLE = "agents"

    cell: str
    """`cell-0`, `cell-1`, ..."""
    inference: InferenceConfig
    """The recipe's section."""
    model_path: Path
    """Weights to start with, in Hugging Face format; the trainer sends its own before any use."""
    serve_python: str
    """The Python that has SGLang."""
    serve_variables: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of SGLang."""
    seed: int = 0
    """The run's seed."""
