"""The base of every configuration class: frozen, typo-proof, documented by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StageConfig(BaseModel):
    """One stage's part of a recipe. Unknown keys are errors; values never change after parsing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
