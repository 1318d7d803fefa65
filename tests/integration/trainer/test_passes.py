"""Passes of a step compute exact gradients and log-probabilities, in float32 and bfloat16."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import (
    KEEP_ALL_ACTIVATIONS,
    ActivationMemoryConfig,
    AdamConfig,
    ParallelConfig,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import memory
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.model import policy as policy_module
from areal_hpc.trainer.model.cpu.megatron_cpu import patch_torch_megatron_without_gpu
from areal_hpc.trainer.model.families.architecture import Architecture, MoeConfig
from areal_hpc.trainer.model.hf_weights import load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import (
    STEP_HISTOGRAM_BINS,
    STEP_MAXIMUM_NAMES,
    STEP_SUM_NAMES,
    LossStats,
)
from areal_hpc.trainer.optimizer import build_optimizer, step_optimizer
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    run_passes,
)
from tests.support.layout_worker import exported_gradients
from tests.support.plain_torch import OperationLog
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run
from tests.support.replay_worker import Scenario, begin_training, make_learner, state_of, take_step
from tests.support.replayed_run import check_layouts_agree
from tests.support.thoroughness import choose

DENSE = Architecture("qwen2", 3, 64, 8, 4, 8, 128, 256, 1e-6, 1e4, None, tied=True, qkv_bias=True)
MIXTURE = replace(
    DENSE, qkv_bias=False, qk_norm=True, experts=MoeConfig(4, 2, 48, norm_weights=True)
)
SETTINGS = [
    {"recompute": "full"},
    {"recompute": 1},
    {"recompute": "selective"},
    {"recompute": "full", "offload": True},
    {"offload": True},
]
LAYOUTS = [
    {"parallel": {"tp": 2}},
    {"parallel": {"pp": 2}},
    {"parallel": {"cp": 2}},
    {"parallel": {"dp": 2, "ep": 2}},
]
LENGTHS = (60, 33, 47, 21)


def build(
    arch: Architecture, parallel: ParallelConfig, activations: ActivationMemoryConfig
) -> TrainedNetwork:
    policy = build_policy(arch, parallel, torch.float32, torch.device("cpu"), activations)
    parts = {}

    def draw(tensor: object, part: object) -> torch.Tensor:
        name, shape = tensor.name, tensor.shape  # type: ignore[attr-defined]
        if name not in parts:
            chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parts[name] = torch.randn(shape, generator=chance) * 0.1
        return parts[name][part]  # type: ignore[index]

    load_hf(policy, draw)
    return policy


def make_batches(policy: TrainedNetwork) -> list[MicroBatch]:
    rows = []
    for length in LENGTHS:
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        rows.append(TrainingRow(np.arange(length, dtype=np.int32) * 7 % 256, mask, {}))
    batches = make_micro_batches_of_this_rank(policy, rows, [], max_tokens=64)
    assert len(batches) > 1
    return batches


def compute_gradients(policy: TrainedNetwork) -> dict[str, torch.Tensor]:
    run_forward_backward(
        policy,
        make_batches(policy),
        lambda _, logprobs_N: (-logprobs_N.sum(), LossStats({"tokens": len(logprobs_N)})),
        backward=True,
    )
    return exported_gradients(policy)


def check_settings(parallel: ParallelConfig) -> None:
    memory.MIN_OFFLOADED_BYTES = 1
    for arch in (DENSE, MIXTURE):
        own = parallel if arch.experts else parallel.model_copy(update={"ep": 1})
        expected = compute_gradients(build(arch, own, ActivationMemoryConfig()))
        assert any(tensor.abs().max() > 0 for tensor in expected.values())
        for setting in SETTINGS:
            policy = build(arch, own, ActivationMemoryConfig.model_validate(setting))
            grads = compute_gradients(policy)
            different = [name for name in expected if not torch.equal(grads[name], expected[name])]
            assert different == [], (arch.family, setting)


@pytest.mark.on_ranks(1)
def test_gradients_on_one_rank(scenario: Scenario, paths: RunPaths) -> None:
    check_settings(ParallelConfig())


@pytest.mark.parametrize(
    "scenario",
    choose(LAYOUTS, LAYOUTS[1]),
    indirect=True,
)
@pytest.mark.on_ranks(2)
def test_gradients_on_two_ranks(scenario: Scenario, paths: RunPaths) -> None:
    check_settings(ParallelConfig.model_validate(scenario["trainer"]["parallel"]))


SMALL_BUCKET = 2_000


@pytest.mark.on_ranks(2)
def test_a_checkpoint_of_many_buckets_is_resumed_to_the_same_bits(
    scenario: Scenario, paths: RunPaths
) -> None:
    policy_module.GRADIENT_BUCKET_ELEMENTS = SMALL_BUCKET
    learner = begin_training(scenario, paths)
    assert learner.policy.ddp_module is not None
    assert len(learner.policy.ddp_module.bucket_groups) > 1
    resumed = make_learner(scenario, paths)
    assert resumed.state.step == 1
    take_step(resumed, paths, 2)
    assert state_of(resumed) == state_of(learner)


CHANNELS = (
    Channel.ADVANTAGE,
    Channel.BEHAVIOR,
    Channel.CURRENT_WEIGHTS,
    Channel.STALENESS,
    Channel.TEMPERATURE,
)


def make_rows() -> list[TrainingRow]:
    chance, rows = np.random.default_rng(4), []
    for length in LENGTHS:
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        channels: dict[str, Any] = {
            name: chance.random(length).astype(np.float32) for name in CHANNELS
        }
        channels[Channel.CURRENT_WEIGHTS] = (np.arange(length) % 2).astype(np.float32)
        ids = chance.integers(0, 256, length).astype(np.int32)
        rows.append(TrainingRow(ids, mask, channels))
    return rows


def check_reads(scenario: Scenario, paths: RunPaths, arch: Architecture) -> None:
    learner = make_learner(scenario, paths)
    policy = build(arch, ParallelConfig(), ActivationMemoryConfig())
    batches = make_micro_batches_of_this_rank(policy, make_rows(), CHANNELS, max_tokens=64)
    assert len(batches) > 1

    def loss(batch: MicroBatch, logits_1NV: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        return learner._trainer._compute_loss(
            batch, logits_1NV, minibatch_index=0, updates_done_share=0, factor=1.0
        )

    with OperationLog() as log:
        stats = run_passes(policy, batches, loss, backward=True)
    assert len(log.names) > 100
    assert log.reads == []
    copies = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.shape)
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", copy)
        reduced = stats.reduce_over_ranks(STEP_SUM_NAMES, STEP_MAXIMUM_NAMES, STEP_HISTOGRAM_BINS)
    assert len(copies) == 1
    assert reduced.sums["tokens"] == sum(len(batch.labels_N) for batch in batches)
    assert 0 < reduced.sums["compared"] < reduced.sums["tokens"]


@pytest.mark.parametrize(
    "scenario",
    [
        {},
        {"objective": {"off_policy_correction": "mask", "off_policy_correction_level": "sequence"}},
    ],
    indirect=True,
)
@pytest.mark.on_ranks(1)
def test_a_dense_network(scenario: Scenario, paths: RunPaths) -> None:
    check_reads(scenario, paths, DENSE)


@pytest.mark.on_ranks(1)
def test_tensors_are_made_on_the_default_device_after_it_as_before(
    scenario: Scenario, paths: RunPaths
) -> None:
    patch_torch_megatron_without_gpu()
    with torch.device("meta"):
        tensors = torch.empty(2), torch.zeros(2), torch.tensor([1.0]), torch.ones(2)
    assert {str(tensor.device) for tensor in tensors} == {"meta"}
    assert str(torch.zeros(2, device="cuda").device) == "cpu"


TIED = replace(DENSE, layers=2, vocab=500)
LENGTH = 60
MOST_ERROR = 2e-5
"""Largest error of a log-probability, in nats; with logits in bfloat16 it is .03."""


def build_in_bfloat16(arch: Architecture, parallel: ParallelConfig) -> TrainedNetwork:
    device = torch.device("cpu")
    policy = build_policy(arch, parallel, torch.bfloat16, device, KEEP_ALL_ACTIVATIONS)

    def draw(tensor: Any, part: Any) -> torch.Tensor:
        chance = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
        drawn = torch.randn(tensor.shape, generator=chance) * 0.3
        return drawn.bfloat16()[part]

    load_hf(policy, draw)
    return policy


def score_with_states(policy: TrainedNetwork) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of a row with its backward pass, and the states behind them."""
    states: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    norm = policy.gpt.decoder.final_layernorm
    hook = norm.register_forward_hook(lambda _module, _given, state: states.append(state.detach()))

    def note(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        logprobs.append(logprobs_N.detach())
        return logprobs_N.sum(), LossStats({"tokens": len(logprobs_N)})

    ids = np.arange(LENGTH, dtype=np.int32) * 7 % TIED.vocab
    row = TrainingRow(ids, np.ones(LENGTH, dtype=np.uint8), {})
    batches = make_micro_batches_of_this_rank(policy, [row], [], max_tokens=64)
    run_forward_backward(policy, batches, note, backward=True)
    hook.remove()
    return torch.cat(logprobs), torch.cat(states)[:, 0]


@pytest.mark.on_ranks(1)
def test_logprobs_in_bfloat16_are_those_of_the_last_states(
    scenario: Scenario, paths: RunPaths
) -> None:
    for arch in (TIED, replace(TIED, tied=False)):
        policy = build_in_bfloat16(arch, ParallelConfig())
        logprobs_N, states_TH = score_with_states(policy)
        name = "embedding.word_embeddings" if arch.tied else "output_layer"
        weight = dict(policy.gpt.named_parameters())[f"{name}.weight"].detach()
        exact = states_TH.double() @ weight[: arch.vocab].double().T
        labels = torch.arange(1, LENGTH) * 7 % arch.vocab
        places = exact[: LENGTH - 1].log_softmax(-1).gather(1, labels[:, None])[:, 0]
        assert (logprobs_N.double() - places).abs().max() <= MOST_ERROR


class RoundingLog(TorchDispatchMode):
    """Log of copies between dtypes, by the memory that they read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read_storages: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.read_storages.append(args[1].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.on_ranks(1)
def test_no_weights_are_rounded_where_an_offloaded_optimizer_lies(
    scenario: Scenario, paths: RunPaths
) -> None:
    policy = build_in_bfloat16(TIED, ParallelConfig())
    optimizer: Any = build_optimizer(policy, AdamConfig(), is_offloaded=True)
    optimizer.reload_model_params()
    for parameter in policy.gpt.parameters():
        parameter.main_grad.normal_()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    with RoundingLog() as log:
        step_optimizer(optimizer, rate=1e-2)
    assert len(log.read_storages) >= len(masters)
    assert not {master.untyped_storage().data_ptr() for master in masters} & {*log.read_storages}
    for shard in optimizer.list_shards():
        assert torch.equal(shard.weights, shard.master.bfloat16())
        assert shard.moments["exp_avg"].abs().max() > 0


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=str)
def test_layouts_agree_in_bfloat16(
    ranks: RankServer, tmp_path: Path, parallel: dict[str, int]
) -> None:
    paths = record_run(tmp_path / "recorded", 1)
    ((divided, alone),) = check_layouts_agree(
        ranks, paths.root, tmp_path, {}, ["grad_norm"], layouts=[parallel], rel=0.02,
        steps=1, minibatches=1, more={"dtype": "bfloat16"},
    )  # fmt: skip
    assert divided["entropy/mean"] == pytest.approx(alone["entropy/mean"], rel=1e-3)
