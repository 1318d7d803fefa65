"""Every parallel layout computes what transformers computes, and any layout resumes any other.

A quick selection of docs/parity.md, one launch a layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.trainer.conftest import ALL, OTHERS
from tests.support.layout_launch import Findings
from tests.support.parity_table import (
    FAMILIES,
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    NORM_BOUND,
    RESUME_BOUND,
)
from tests.support.reference_models import hf_model

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_logprobs_are_those_of_transformers(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    found = findings[layout][family]
    assert found["tokens"] == findings["1"][family]["tokens"] > 50
    assert found["micro_batches"] > 1
    assert found["logprob_gap"] <= LOGPROB_BOUND


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_gradients_are_those_of_transformers(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    assert findings[layout][family]["gradient_gap"] <= GRADIENT_BOUND
    assert findings[layout][family]["norm_gap"] <= NORM_BOUND


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_export_is_the_loaded_model_bit_by_bit(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    found = findings[layout][family]
    assert found["export_is_exact"]
    assert found["specs_match"]
    assert found["missing"] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_the_step_after_a_resume_is_bitwise_the_same(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    assert findings[layout][family]["resume_is_bitwise"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_any_layout_resumes_on_one_rank(
    findings: dict[str, Findings], family: str
) -> None:
    resumed = findings["1"][family]["resumed_from"]
    assert sorted(resumed) == sorted(OTHERS)
    # One AdamW step at lr 1e-3: a lost moment or step count would show as 1e-4 and more.
    for layout, gaps in resumed.items():
        assert gaps["weight_gap"] <= RESUME_BOUND, layout
        assert gaps["loss_gap"] <= RESUME_BOUND, layout


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_transformers_the_same_logits(
    findings: dict[str, Findings], root: Path, family: str
) -> None:
    original = hf_model(family)
    ids = torch.arange(30)[None]
    for layout in ALL:
        folder = root / layout / family / "saved"
        assert (folder / "model.safetensors.index.json").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(loaded(ids).logits, original(ids).logits), layout
