"""Adapter that is sent to servers with their own base, counted on tensors without numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.trainer.model.families.architecture import parse_architecture
from areal_hpc.trainer.model.families.lora import AdapterExport, add_adapter
from areal_hpc.trainer.model.families.transformers_modules import build_shapes
from areal_hpc.trainer.model.parameter_counts import (
    count_adapter_parameters,
    count_model_parameters,
)
from tests.support.reference_models import SIZES, STATE_LAYERS

QWEN3_4B = Path(__file__).parents[2] / "samples/models/Qwen3-4B/config.json"


def export_of(config: dict[str, Any], lora: LoraConfig) -> AdapterExport:
    shapes = build_shapes(config)
    add_adapter(shapes, lora)
    return AdapterExport(parse_architecture(config, "a", lora), shapes.state_dict().__getitem__)


def test_an_adapter_is_less_than_a_fiftieth_of_a_qwen3_4b() -> None:
    config, lora = json.loads(QWEN3_4B.read_bytes()), LoraConfig(rank=32, sync="adapter")
    sent = sum(tensor.numel() for tensor in export_of(config, lora).read_tensors().values())
    arch = parse_architecture(config, "a")
    assert sent == count_adapter_parameters(arch, lora)
    assert sent <= count_model_parameters(arch) / 50


def test_layers_that_no_server_adapts_are_named() -> None:
    config = transformers.Qwen3_5TextConfig(**SIZES, **STATE_LAYERS).to_dict()
    export = export_of(config, LoraConfig(sync="adapter"))
    with pytest.raises(RecipeError, match="servers would not adapt in_proj_a, in_proj_b") as error:
        export.read_tensors()
    assert "at: trainer.lora.sync\n" in str(error.value)
    attention = LoraConfig(sync="adapter", target_modules=("q_proj", "v_proj"))
    assert export_of(config, attention).read_tensors()
