"""A training step without memory fails with its place, the batch size, and a remedy."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.learner import Learner
from tests.support.rank_server import RankServer
from tests.support.replay_worker import Scenario, config_of, make_learner, take_step

TOO_MUCH_BYTES = 1 << 60
BATCH = r"micro-batch (\d+) of (\d+) \((\d+) rows?, (\d+) tokens, the longest row (\d+)\)"


def allocate_too_much(*_: object) -> None:
    """Allocate until the CPU's allocator refuses, in its own words."""
    torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)


def raise_as_cuda_does(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def fail_step(
    scenario: Scenario, paths: RunPaths, prepare: Callable[[Learner], object]
) -> tuple[str, str, str]:
    """Return message, key and hint of the error of a step."""
    learner = make_learner(scenario, paths)
    prepare(learner)
    with pytest.raises(RecipeError) as caught:
        take_step(learner, paths, 1)
    (problem,) = caught.value.problems
    return problem.message, problem.key, problem.hint


@pytest.mark.on_ranks(1)
def test_a_forward_pass_is_named(scenario: Scenario, paths: RunPaths) -> None:
    for fail, quoted in (
        (allocate_too_much, f"you tried to allocate {TOO_MUCH_BYTES} bytes"),
        (raise_as_cuda_does, "CUDA out of memory. Tried to allocate 2.50 GiB."),
    ):

        def prepare(learner: Learner, fail: Callable[..., None] = fail) -> None:
            learner.policy.gpt.decoder.layers[1].register_forward_pre_hook(fail)

        message, key, hint = fail_step(scenario, paths, prepare)
        match = re.search(f"memory ran out in the forward pass of {BATCH}", message)
        assert match is not None, message
        number, count, rows, tokens, longest = map(int, match.groups())
        assert number == 1 < count
        assert 0 < longest <= tokens <= config_of(scenario).max_tokens_per_microbatch
        assert math.ceil(tokens / longest) <= rows
        assert re.search(r"has held [\d.]+ GiB at most; estimated are [\d.]+ GiB \(param", message)
        assert quoted in message
        assert key == "trainer.max_tokens_per_microbatch"
        assert re.match(r"trainer\.recompute=\w+ takes [\d.]+ GiB, estimated; or lower", hint), hint


@pytest.mark.on_ranks(1)
def test_a_backward_pass_is_named(scenario: Scenario, paths: RunPaths) -> None:
    def prepare(learner: Learner) -> None:
        weight = learner.policy.gpt.decoder.layers[0].mlp.linear_fc2.weight
        weight.register_hook(allocate_too_much)

    message, _, _ = fail_step(scenario, paths, prepare)
    text = f"memory ran out in a backward pass, after the forward pass of {BATCH}"
    assert re.search(text, message), message


@pytest.mark.on_ranks(1)
def test_the_step_of_the_optimizer_is_named(scenario: Scenario, paths: RunPaths) -> None:
    def prepare(learner: Learner) -> None:
        optimizer: Any = learner._optimizer
        (part,) = optimizer.chained_optimizers
        part.optimizer.register_step_pre_hook(allocate_too_much)

    message, _, hint = fail_step(scenario, paths, prepare)
    assert "memory ran out in the optimizer's step. " in message
    assert hint.startswith("trainer.offload.optimizer=true")


def run_out_on_rank_1(scenario: Scenario, paths: RunPaths) -> None:
    learner = make_learner(scenario, paths)
    if torch.distributed.get_rank() == 1:
        learner.policy.gpt.decoder.layers[0].register_forward_pre_hook(allocate_too_much)
    take_step(learner, paths, 1)


def test_the_rank_that_ran_out_reports_and_the_run_is_not_started_again(
    ranks: RankServer, paths: RunPaths
) -> None:
    settings: dict[str, Any] = {"total_steps": 1, "parallel": {"pp": 2}}
    outcome = ranks.call(run_out_on_rank_1, paths, 2, trainer=settings)
    assert outcome.codes[1] == RecipeError.exit_code, outcome.log
    assert outcome.codes[0] not in (0, RecipeError.exit_code)
    assert outcome.reports[1]["kind"] == "RecipeError"
    assert "the forward pass of micro-batch 1 of" in outcome.reports[1]["error"]
