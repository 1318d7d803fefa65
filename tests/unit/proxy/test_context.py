"""The context is what the recipe says, else what the model's configuration allows."""

import json
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.proxy.engine.model_call import require_max_position_embeddings


def test_the_models_own_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    assert require_max_position_embeddings(tmp_path) == 4096


def test_a_model_that_does_not_say_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"inference\.context_length"):
        require_max_position_embeddings(tmp_path)
