"""Grouped experts in a network: as Megatron's loop over experts, in numbers and in checkpoints."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from areal_hpc.recipe.sections.trainer import ActivationMemoryConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.model.elementwise import swiglu
from areal_hpc.trainer.model.hf_weights import stream_hf_tensors
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import MicroBatch, run_forward_backward
from tests.integration.trainer.test_passes import MIXTURE, build, make_batches
from tests.support.replay_worker import Scenario


def build_loop(experts: Any) -> Any:
    """Megatron's experts with the weights of grouped ones."""
    spec = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm", moe_grouped_gemm=False)
    submodules = spec.submodules.mlp.submodules.experts.submodules
    submodules.activation_func = swiglu
    groups = ProcessGroupCollection.use_mpu_process_groups()
    number = len(experts.linear_fc1.weight)
    config = copy.copy(experts.config)
    config.no_sync_func = None  # it copies the rest deeply, and this one leads to process groups
    loop = SequentialMLP(number, config, submodules, groups)
    with torch.no_grad():
        for place, expert in enumerate(loop.local_experts):
            expert.linear_fc1.weight.copy_(experts.linear_fc1.weight[place])
            expert.linear_fc2.weight.copy_(experts.linear_fc2.weight[place])
    return loop


def describe_checkpoint(module: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Global shape and dtype of every tensor that a module saves as that of layer 2 of 5."""
    state = module.sharded_state_dict("experts.", ((0, 2, 5),))
    apply_factories(state)
    found: dict[str, set[tuple[Any, ...]]] = {}
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor):
            continue  # an empty state of Transformer Engine's that Megatron's layers save
        found.setdefault(tensor.key, set()).add((tensor.global_shape, tensor.dtype))
    return found


def score(policy: TrainedNetwork) -> torch.Tensor:
    """Log-probabilities of all micro-batches; leaves the gradients of their sum."""
    seen = []

    def remember(_: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        seen.append(logprobs_N.detach().clone())
        return -logprobs_N.sum(), LossStats()

    run_forward_backward(policy, make_batches(policy), remember, backward=True)
    return torch.cat(seen)


def check_against_loop(parallel: ParallelConfig) -> None:
    grouped = build(MIXTURE, parallel, ActivationMemoryConfig())
    found = score(grouped)
    looping = build(MIXTURE, parallel, ActivationMemoryConfig())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for layer in (layer.mlp for layer in looping.gpt.decoder.layers):
        loop = build_loop(layer.experts)
        assert describe_checkpoint(layer.experts) == describe_checkpoint(loop)
        layer.experts = loop
        layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, groups
        )
    torch.testing.assert_close(score(looping), found, atol=1e-6, rtol=0)
    if parallel.world_size > 1:
        return  # the loop's gradients are in no buffer, which would be reduced
    layers = zip(grouped.gpt.decoder.layers, looping.gpt.decoder.layers, strict=True)
    for one, other in layers:
        for name in ("linear_fc1", "linear_fc2"):
            loop = [getattr(expert, name).weight.grad for expert in other.mlp.experts.local_experts]
            expected = torch.stack(loop) / len(found)
            assert expected.abs().max() > 1e-4
            own = getattr(one.mlp.experts, name).weight.main_grad
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)


@pytest.mark.on_ranks(1)
def test_on_one_rank(scenario: Scenario, paths: RunPaths) -> None:
    check_against_loop(ParallelConfig())


@pytest.mark.parametrize(
    "scenario",
    [{"parallel": {"dp": 2, "ep": 2}}, {"parallel": {"tp": 2, "ep": 2}}],
    indirect=True,
)
@pytest.mark.on_ranks(2)
def test_on_two_ranks(scenario: Scenario, paths: RunPaths) -> None:
    check_against_loop(ParallelConfig.model_validate(scenario["trainer"]["parallel"]))


@pytest.mark.parametrize("scenario", [{"parallel": {"dp": 2, "ep": 2}}], indirect=True)
@pytest.mark.on_ranks(2)
def test_spread_experts_leave_in_two_collectives_a_layer(
    scenario: Scenario, paths: RunPaths
) -> None:
    parallel = ParallelConfig.model_validate(scenario["trainer"]["parallel"])
    policy = build(MIXTURE, parallel, ActivationMemoryConfig())
    gather = mock.patch.object(
        torch.distributed,
        "all_gather_into_tensor",
        wraps=torch.distributed.all_gather_into_tensor,
    )
    with gather as gathered:
        names = [name for name, _ in stream_hf_tensors(policy) if ".experts." in name]
    assert MIXTURE.experts is not None
    assert len(names) == 3 * MIXTURE.layers * MIXTURE.experts.count
    assert gathered.call_count == 2 * MIXTURE.layers
