"""Experts of a mixture reach a real replica, and two that were swapped on the way are found."""

from collections.abc import Iterator

import pytest
import torch
import transformers

from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import scaled
from tests.support.inference_cell import VOCABULARY, Cell, running_cell
from tests.support.reference_models import by_checkpoint_name
from tests.support.weight_updates import probe_of, publish, publishing, raise_if_failed

SWAPPED = [f"model.layers.1.mlp.experts.{at}.down_proj.weight" for at in (5, 6)]


@pytest.fixture(scope="module")
def model() -> transformers.Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def cell(
    tmp_path_factory: pytest.TempPathFactory, model: transformers.Qwen3MoeForCausalLM
) -> Iterator[Cell]:
    with running_cell(tmp_path_factory.mktemp("run"), model) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        yield cell


@pytest.mark.thorough
def test_experts_reach_a_replica_and_two_that_are_swapped_are_found(
    cell: Cell, model: transformers.Qwen3MoeForCausalLM
) -> None:
    weights = by_checkpoint_name(dict(model.state_dict()))
    with publishing(
        cell.paths.rendezvous_dir,
        cell.service_key,
        bucket_bytes=50_000,
        update_timeout_s=scaled(20),
    ) as publisher:
        swapped = weights | {SWAPPED[0]: weights[SWAPPED[1]], SWAPPED[1]: weights[SWAPPED[0]]}
        report = publish(publisher, WeightVersion(1, 0), swapped, probe=probe_of(model))
        assert "differ from the trainer's by" in str(*report.failed.values())
        assert cell.replica().version == ""
        raise_if_failed(publish(publisher, WeightVersion(1, 1), weights, probe=probe_of(model)))
        assert cell.replica().version == "1.1"
