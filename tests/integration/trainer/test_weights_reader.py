"""Checkpoints of another model are refused before a tensor is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.trainer.checkpoints.export import CheckpointWeights, get_stored_name
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.families.weight_map import list_parameter_maps

QWEN3 = Architecture(
    "qwen3", layers=2, hidden=12, heads=8, kv_heads=4, head_dim=2, ffn=20, vocab=13,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=True,
)  # fmt: skip


class Stored:
    """Shapes that a checkpoint of a model would have."""

    def __init__(self, arch: Architecture, **changes: tuple[int, ...]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        for one in list_parameter_maps(arch):
            stacked = () if one.layer is None else (arch.layers,)
            rows = sum(tensor.shape[0] for tensor in one.hf)
            self.shapes[get_stored_name(one)] = (*stacked, rows, *one.hf[0].shape[1:])
        self.shapes |= changes

    def find_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes.get(name, ())


def read(stored: Stored, arch: Architecture) -> None:
    anything: Any = stored
    CheckpointWeights(anything, arch, Path("/run/checkpoints/step_3"))


def test_the_right_model_is_read_with_a_vocabulary_that_is_padded() -> None:
    read(Stored(QWEN3), QWEN3)
    name, shape = next(item for item in Stored(QWEN3).shapes.items() if "embedding" in item[0])
    read(Stored(QWEN3, **{name: (shape[0] + 64, shape[1])}), QWEN3)


@pytest.mark.parametrize("layers", [-1, 1])
def test_another_number_of_layers_is_refused(layers: int) -> None:
    other = replace(QWEN3, layers=QWEN3.layers + layers)
    with pytest.raises(RecipeError, match="export with the recipe"):
        read(Stored(other), QWEN3)


def test_another_width_is_refused() -> None:
    name, shape = next(item for item in Stored(QWEN3).shapes.items() if len(item[1]) == 3)
    for wrong in ((*shape[:2], shape[2] + 8), (shape[0], shape[1] + 8, shape[2])):
        with pytest.raises(RecipeError, match="the checkpoint has"):
            read(Stored(QWEN3, **{name: wrong}), QWEN3)
