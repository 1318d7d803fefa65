"""A policy in bfloat16: its log-probabilities are those of its last states, in float64."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import KEEP_ALL_ACTIVATIONS, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.hf_weights import load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import MicroBatch, make_micro_batches_of_this_rank, run_forward_backward
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run
from tests.support.replay_worker import Scenario
from tests.support.replayed_run import check_layouts_agree

TIED = Architecture("qwen2", 2, 64, 8, 4, 8, 128, 500, 1e-6, 1e4, None, tied=True)
LENGTH = 60
MOST_ERROR = 2e-5
"""Of a log-probability, in nats; with logits in bfloat16 it is .03."""


def build(arch: Architecture, parallel: ParallelConfig) -> TrainedNetwork:
    device = torch.device("cpu")
    policy = build_policy(arch, parallel, torch.bfloat16, device, KEEP_ALL_ACTIVATIONS)

    def draw(tensor: Any, part: Any) -> torch.Tensor:
        chance = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
        drawn = torch.randn(tensor.shape, generator=chance) * 0.3
        return drawn.bfloat16()[part]

    load_hf(policy, draw)
    return policy


def score(policy: TrainedNetwork) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a row with its backward pass, and the states that they come from."""
    states: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    norm = policy.gpt.decoder.final_layernorm
    hook = norm.register_forward_hook(lambda _module, _given, given: states.append(given.detach()))

    def note(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        found.append(logprobs_N.detach())
        return logprobs_N.sum(), LossStats({"tokens": len(logprobs_N)})

    ids = np.arange(LENGTH, dtype=np.int32) * 7 % TIED.vocab
    row = TrainingRow(ids, np.ones(LENGTH, dtype=np.uint8), {})
    batches = make_micro_batches_of_this_rank(policy, [row], [], max_tokens=64)
    run_forward_backward(policy, batches, note, backward=True)
    hook.remove()
    return torch.cat(found), torch.cat(states)[:, 0]


@pytest.mark.on_ranks(1)
def test_on_one_rank_for_tied_and_untied_weights(scenario: Scenario, paths: RunPaths) -> None:
    for arch in (TIED, replace(TIED, tied=False)):
        policy = build(arch, ParallelConfig())
        logprobs_N, states_TH = score(policy)
        name = "embedding.word_embeddings" if arch.tied else "output_layer"
        weight = dict(policy.gpt.named_parameters())[f"{name}.weight"].detach()
        exact = states_TH.double() @ weight[: arch.vocab].double().T
        labels = torch.arange(1, LENGTH) * 7 % arch.vocab
        places = exact[: LENGTH - 1].log_softmax(-1).gather(1, labels[:, None])[:, 0]
        assert (logprobs_N.double() - places).abs().max() <= MOST_ERROR


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=str)
def test_layouts_agree(ranks: RankServer, tmp_path: Path, parallel: dict[str, int]) -> None:
    """As far as states in bfloat16 do."""
    paths = record_run(tmp_path / "recorded", 1)
    ((divided, alone),) = check_layouts_agree(
        ranks, paths.root, tmp_path, {}, ["grad_norm"], layouts=[parallel], rel=0.02,
        steps=1, minibatches=1, more={"dtype": "bfloat16"},
    )  # fmt: skip
    assert divided["entropy/mean"] == pytest.approx(alone["entropy/mean"], rel=1e-3)
