"""Optimizer steps with state on the host equal torch's bit for bit; schedules of steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import AdamConfig, compute_learning_rate
from areal_hpc.trainer.config import EvaluationSetSchedule, Schedule
from areal_hpc.trainer.live_run import AsyncEvaluationTracker
from areal_hpc.trainer.memory import MIN_OFFLOADED_BYTES, ActivationOffload
from areal_hpc.trainer.optimizer import (
    MOMENT_NAMES,
    HostAdamW,
    hold_master_stand_ins,
    offload_optimizer,
    switch_adamw_to_fused_kernel,
)
from areal_hpc.trainer.sft import get_batch_indices
from areal_hpc.weights.replicas import DiscoveredReplicas, ReplicaKey
from areal_hpc.wire.replicas import ReplicaState, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

SIZES = (1000, 7, 4096)
CHUNK = 256
"""Elements of a chunk: the first parameter has three and a rest, the second less than one."""


class Optimizer:
    """AdamW over float32 parameters as Megatron's distributed optimizer holds them."""

    def __init__(
        self, *, has_masters: bool = True, is_offloaded: bool = False, is_fused: bool = False
    ) -> None:
        chance = torch.Generator().manual_seed(5)
        self.parameters = [torch.randn(size, generator=chance) for size in SIZES]
        self.adam = torch.optim.AdamW(self.parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for parameter in self.parameters:
            self.adam.state[parameter] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(parameter) for name in MOMENT_NAMES},
            }
        masters = self.parameters if has_masters else []
        self.weights = [master.bfloat16() for master in masters]
        part = SimpleNamespace(
            optimizer=self.adam,
            shard_fp32_from_float16_groups=[masters],
            shard_float16_groups=[self.weights],
        )
        self.megatron: Any = SimpleNamespace(chained_optimizers=[part])
        if is_fused:
            switch_adamw_to_fused_kernel(self.megatron, torch.device("cpu"))
        if is_offloaded:
            offload_optimizer(self.megatron, torch.device("cpu"), CHUNK)

    def step(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        with hold_master_stand_ins(self.megatron):
            for parameter in self.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=chance)
            self.adam.step()

    @property
    def content(self) -> list[torch.Tensor]:
        moments = [self.adam.state[parameter] for parameter in self.parameters]
        return [
            *self.parameters,
            *(state[name] for state in moments for name in ("step", *MOMENT_NAMES)),
        ]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("has_masters", [True, False])
def test_steps_have_the_same_bits(has_masters: bool, is_fused: bool) -> None:
    plain = Optimizer(has_masters=has_masters, is_fused=is_fused)
    offloaded = Optimizer(has_masters=has_masters, is_offloaded=True, is_fused=is_fused)
    assert isinstance(offloaded.adam, HostAdamW)
    for seed in range(4):
        plain.step(seed)
        offloaded.step(seed)
        for expected, actual in zip(plain.content, offloaded.content, strict=True):
            assert torch.equal(expected, actual)
        for weight, master in zip(offloaded.weights, plain.parameters, strict=has_masters):
            assert torch.equal(weight, master.bfloat16())


def test_what_is_lent_takes_no_memory_and_comes_back_when_no_step_is_taken() -> None:
    offloaded = Optimizer(has_masters=True, is_offloaded=True)
    before = [tensor.clone() for tensor in offloaded.content]
    with hold_master_stand_ins(offloaded.megatron):
        for parameter, size in zip(offloaded.parameters, SIZES, strict=True):
            assert parameter.shape == (size,)
            assert parameter.untyped_storage().nbytes() == 4
            parameter.grad = torch.ones(size)
    assert all(parameter.grad is None for parameter in offloaded.parameters)
    for expected, actual in zip(before, offloaded.content, strict=True):
        assert torch.equal(expected, actual)


def test_large_activations_are_copied_and_parameters_stay() -> None:
    layer = torch.nn.Linear(64, 512, bias=False)
    large = torch.randn(1024, 64, requires_grad=True)
    small = torch.randn(2, 64, requires_grad=True)
    offload = ActivationOffload(layer.parameters())
    with offload:
        total = layer(large).tanh().sum() + layer(small).tanh().sum()
    kept_bytes = 4 * (large.numel() + 1024 * 512)  # the input, and the output of tanh
    assert kept_bytes > MIN_OFFLOADED_BYTES > 4 * 2 * 512
    assert offload.offloaded_bytes == kept_bytes
    (gradient,) = torch.autograd.grad(total, [layer.weight])
    (expected,) = torch.autograd.grad(
        layer(large).tanh().sum() + layer(small).tanh().sum(), [layer.weight]
    )
    assert torch.equal(gradient, expected)


def test_the_rate_climbs_then_stays() -> None:
    config = AdamConfig(lr=1.0, warmup_steps=4)
    rates = [compute_learning_rate(step, 100, config) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_decays_to_its_floor(decay: str) -> None:
    config = AdamConfig.model_validate({"lr": 1.0, "decay": decay, "min_lr_ratio": 0.1})
    rates = [compute_learning_rate(step, 51, config) for step in range(51)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[25] == pytest.approx(0.55)
    assert rates[50] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)


def test_steps_are_evaluated_saved_and_exported_as_asked() -> None:
    schedule = Schedule(
        total_steps=7,
        checkpoint_every_steps=3,
        export_every_steps=0,
        evaluations={"valid": EvaluationSetSchedule(5, 8)},
    )
    steps = range(8)
    assert [step for step in steps if schedule.evaluates(step)] == [0, 5, 7]
    assert (schedule.list_evaluation_steps(-1, 7), schedule.list_evaluation_steps(0, 6)) == (
        [0, 5, 7],
        [5],
    )
    assert [step for step in steps if schedule.saves_checkpoint(step)] == [3, 6, 7]
    assert [step for step in steps if schedule.exports_model(step)] == [7]


def test_each_evaluation_set_has_its_own_steps_and_all_have_the_first_and_the_last() -> None:
    sets = {
        "valid": EvaluationSetSchedule(2, 8),
        "aime": EvaluationSetSchedule(3, 30),
        "final": EvaluationSetSchedule(0, 5),
    }
    schedule = Schedule(7, 3, None, sets)
    due = [list(schedule.count_tasks_by_due_set(step)) for step in range(8)]
    every, two = ["valid", "aime", "final"], ["valid", "aime"]
    assert due == [every, [], ["valid"], ["aime"], ["valid"], [], two, every]
    assert schedule.count_tasks_by_set_due_since(2, 5) == {"aime": 30, "valid": 8}
    assert schedule.count_tasks_by_set_due_since(4, 5) == {}


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 1000))
def test_each_pass_shows_every_demonstration_once(size: int, batch: int, seed: int) -> None:
    steps = -(-3 * size // batch)
    shown = [index for step in range(steps) for index in get_batch_indices(step, batch, size, seed)]
    for turn in range(3):
        assert sorted(shown[turn * size : (turn + 1) * size]) == list(range(size))


TOTAL = 12
SCHEDULE = Schedule(TOTAL, 1, 0, {"valid": EvaluationSetSchedule(5, 8)})
"""Steps 0, 5, 10 and 12 are judged."""
READY = ""


def cell(*versions: str) -> DiscoveredReplicas:
    """Make a cell's replicas by the versions that they serve."""
    return [entry(at, "serving" if one else "ready", one) for at, one in enumerate(versions)]


def entry(index: int, state: ReplicaState, version: str = "") -> tuple[ReplicaKey, ReplicaView]:
    key = ReplicaKey("evaluation", index, 1, 1, "http://relay", 0.0)
    return key, ReplicaView(index, 1, state, "http://replica", version)


def at(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def test_a_trainer_that_resumes_owes_what_its_metrics_lack() -> None:
    assert not AsyncEvaluationTracker(SCHEDULE, judged_step=5).has_unjudged_up_to(9)
    assert AsyncEvaluationTracker(SCHEDULE, judged_step=4).has_unjudged_up_to(9)
    assert AsyncEvaluationTracker(SCHEDULE, judged_step=-1).begin_evaluation(at(9)) == [0, 5]


@given(st.lists(st.sampled_from(["train", "give", "lose", "finish"]), max_size=60))
def test_episodes_are_only_ever_played_on_the_version_of_their_evaluation(moves: list[str]) -> None:
    """A cell of one replica serves the version under evaluation whenever it serves."""
    beside, step, held, judged = AsyncEvaluationTracker(SCHEDULE, -1), 0, READY, list[int]()
    for move in [*moves, *["train"] * TOTAL, *["give", "finish"] * 3]:
        if move == "train" and step < TOTAL:
            step += 1
        if move == "lose":
            held = READY
        if move == "give" and beside.list_replicas_to_update_now(cell(held), at(step)):
            assert held != str(beside.under_way), "weights under evaluation were replaced"
            held = str(at(step))
        if beside.may_grant_episodes(cell(held), at(step)):
            beside.begin_evaluation(at(step))
        if move == "finish" and beside.under_way is not None and held:
            assert held == str(beside.under_way)
            judged.append(beside.under_way.step)
            beside.mark_judged()
    assert judged == sorted(set(judged)), "later labels are newer weights"
    assert judged[-1] == TOTAL
    assert not beside.has_unjudged_up_to(TOTAL)
