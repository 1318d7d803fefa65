"""Tokens of a mixture visit the given experts, and grouped experts compute as a loop over them."""

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
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

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import ActivationMemoryConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.elementwise import swiglu
from areal_hpc.trainer.model.families.architecture import parse_architecture
from areal_hpc.trainer.model.hf_weights import load_hf, stream_hf_tensors
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    score_rows,
)
from tests.integration.trainer.test_passes import MIXTURE, build, make_batches
from tests.support.layout_worker import exported_gradients, make_rows
from tests.support.rank_server import RankServer
from tests.support.reference_models import by_checkpoint_name, hf_model
from tests.support.replay_worker import Scenario
from tests.support.routed_reference import following

FLOAT64_BOUND = 1e-5
"""Bound of gradients in float32, relative to the largest of a tensor."""


def test_a_perturbed_router_and_gradients_of_float64(ranks: RankServer, tmp_path: Any) -> None:
    outcome = ranks.call(check_perturbed_routers, RunPaths(tmp_path), 1)
    assert outcome.codes == [0], outcome.log


def check_perturbed_routers(scenario: dict[str, Any], paths: RunPaths) -> None:
    for family in ("qwen3_moe", "glm4_moe", "gpt_oss"):
        before = load(family, perturbation=0.0)
        rows = [as_row(row, choose_routes(family, row)) for row in make_rows(1)]
        assert measure_rerouted_share(before, rows) == 0
        after = load(family, perturbation=0.3)
        plain = [as_row(row, None) for row in rows]
        alone, replayed = choices_of(after, plain), choices_of(after, rows)
        recorded = choices_of(before, plain)
        assert sum(not np.array_equal(new, old) for new, old in zip(alone, recorded, strict=True))
        assert all(np.array_equal(new, old) for new, old in zip(replayed, recorded, strict=True))
        assert 0.05 < measure_rerouted_share(after, rows) < 1
        compare_with_float64(family, after, rows)
        scored = score_rows(after, rows, minibatch_count=1, max_tokens=90)
        assert not np.allclose(np.concatenate(scored), np.concatenate(
            score_rows(after, plain, minibatch_count=1, max_tokens=90)))  # fmt: skip
    dense = load("qwen3", perturbation=0.0)
    assert dense.router_replay is None


def as_row(row: TrainingRow, routes_TLK: Any) -> TrainingRow:
    channels = {"advantage": row.channels["advantage"]}
    return TrainingRow(row.input_ids_T, row.loss_mask_T, channels, None, routes_TLK)


def weights_of(family: str, perturbation: float) -> Any:
    model = hf_model(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += perturbation * parameter.std() * noise
    return model


def load(family: str, perturbation: float) -> TrainedNetwork:
    model = weights_of(family, perturbation)
    arch = parse_architecture(model.config.to_dict(), family)
    policy = build_policy(arch, ParallelConfig(), torch.float32, torch.device("cpu"))
    state = by_checkpoint_name(model.state_dict())
    load_hf(policy, lambda tensor, part: state[tensor.name][part])
    return policy


def choose_routes(family: str, row: TrainingRow) -> npt.NDArray[Any]:
    model = weights_of(family, 0.0)
    arch = parse_architecture(model.config.to_dict(), family)
    assert arch.mixture is not None
    routes = arch.mixture.make_routes(len(row.input_ids_T))
    outputs: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, out: outputs.append(out[2]))
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    with torch.no_grad():
        model(torch.from_numpy(row.input_ids_T).long()[None])
    for hook in hooks:
        hook.remove()
    routes[:-1] = torch.stack(outputs, 1).numpy()[:-1]
    return routes


def loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    return -(logprobs_N * batch.channels_N["advantage"]).sum(), LossStats()


def measure_rerouted_share(policy: TrainedNetwork, rows: Sequence[TrainingRow]) -> float:
    batches = make_micro_batches_of_this_rank(policy, rows, ("advantage",), 90)
    stats = run_forward_backward(policy, batches, loss, backward=False)
    return float(stats.sums["rerouted"]) / float(stats.sums["followed"])


def choices_of(policy: TrainedNetwork, rows: Sequence[TrainingRow]) -> list[npt.NDArray[np.int64]]:
    """Return the experts that the tokens of each row visit, in order, without each last token."""
    choices: list[npt.NDArray[np.int64]] = []

    def note(_router: Any, _states: Any, output: Any) -> None:
        if len(output) == 2:  # Megatron's: weights and a map [T, E]
            tokens, chosen = output[1].nonzero(as_tuple=True)
            ids_TK = chosen.view(int(tokens.max()) + 1, -1)
        else:
            ids_TK = output[2]
        choices.append(ids_TK.sort(1).values[:-1].numpy())

    routers = [layer for layer in policy.gpt.modules() if type(layer).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(note) for router in routers]
    for row in rows:
        batches = make_micro_batches_of_this_rank(policy, [row], ("advantage",), 90)
        run_forward_backward(policy, batches, loss, backward=False)
    for hook in hooks:
        hook.remove()
    return choices


def compare_with_float64(family: str, policy: TrainedNetwork, rows: list[TrainingRow]) -> None:
    model = weights_of(family, 0.3).double()
    model.set_experts_implementation("eager")  # the grouped product has no float64
    tokens = sum(int(row.loss_mask_T[1:].sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(row.input_ids_T).long()
        with following(model, row):
            logits = model(ids[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
        weights = torch.from_numpy(row.channels["advantage"][1:] * row.loss_mask_T[1:])
        (-(logprobs * weights).sum() / tokens).backward()
    expected = by_checkpoint_name({name: weight.grad for name, weight in model.named_parameters()})
    assert policy.ddp_module is not None
    policy.ddp_module.zero_grad_buffer()
    batches = make_micro_batches_of_this_rank(policy, rows, ("advantage",), 90)
    run_forward_backward(policy, batches, loss, backward=True)
    gradients = exported_gradients(policy)
    routers = [name for name in expected if "gate.weight" in name or "router.weight" in name]
    assert routers
    for name, gradient in expected.items():
        gap = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert gap <= FLOAT64_BOUND, (family, name, gap)


def test_a_router_that_chooses_otherwise_is_named(ranks: RankServer, tmp_path: Any) -> None:
    outcome = ranks.call(check_unknown_router, RunPaths(tmp_path), 1)
    assert outcome.codes == [0], outcome.log


def check_unknown_router(scenario: dict[str, Any], paths: RunPaths) -> None:
    policy = load("gpt_oss", perturbation=0.0)
    row = make_rows(1)[0]
    routes = choose_routes("gpt_oss", row)
    kind = type(policy.gpt.causal_lm.model.layers[0].mlp.router)

    def choose_by_sorting(self: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(states, self.weight, self.bias)
        values, ids = (part[:, : self.top_k] for part in logits.sort(1, descending=True))
        return logits, values.softmax(1), ids

    forward, kind.forward = kind.forward, choose_by_sorting
    try:
        broken = load("gpt_oss", perturbation=0.0)
        with pytest.raises(RecipeError, match="choose experts in a way that is not known"):
            measure_rerouted_share(broken, [as_row(row, routes)])
    finally:
        kind.forward = forward


def build_loop(experts: Any) -> Any:
    spec = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm", moe_grouped_gemm=False)
    submodules = spec.submodules.mlp.submodules.experts.submodules
    submodules.activation_func = swiglu
    groups = ProcessGroupCollection.use_mpu_process_groups()
    number = len(experts.linear_fc1.weight)
    config = copy.copy(experts.config)
    config.no_sync_func = None  # it copies the rest deeply, and this one leads to process groups
    loop = SequentialMLP(number, config, submodules, groups)
    with torch.no_grad():
        for index, expert in enumerate(loop.local_experts):
            expert.linear_fc1.weight.copy_(experts.linear_fc1.weight[index])
            expert.linear_fc2.weight.copy_(experts.linear_fc2.weight[index])
    return loop


def describe_checkpoint(module: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Return global shape and dtype of every tensor that a module saves as that of layer 2 of 5."""
    state = module.sharded_state_dict("experts.", ((0, 2, 5),))
    apply_factories(state)
    tensors: dict[str, set[tuple[Any, ...]]] = {}
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor):
            continue  # an empty state of Transformer Engine's that Megatron's layers save
        tensors.setdefault(tensor.key, set()).add((tensor.global_shape, tensor.dtype))
    return tensors


def score(policy: TrainedNetwork) -> torch.Tensor:
    """Return log-probabilities of all micro-batches, and leave the gradients of their sum."""
    logprobs = []

    def remember(_: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        logprobs.append(logprobs_N.detach().clone())
        return -logprobs_N.sum(), LossStats()

    run_forward_backward(policy, make_batches(policy), remember, backward=True)
    return torch.cat(logprobs)


def check_against_loop(parallel: ParallelConfig) -> None:
    grouped = build(MIXTURE, parallel, ActivationMemoryConfig())
    logprobs = score(grouped)
    looping = build(MIXTURE, parallel, ActivationMemoryConfig())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for layer in (layer.mlp for layer in looping.gpt.decoder.layers):
        loop = build_loop(layer.experts)
        assert describe_checkpoint(layer.experts) == describe_checkpoint(loop)
        layer.experts = loop
        layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, groups
        )
    torch.testing.assert_close(score(looping), logprobs, atol=1e-6, rtol=0)
    if parallel.world_size > 1:
        return  # the loop's gradients are in no buffer, which would be reduced
    layers = zip(grouped.gpt.decoder.layers, looping.gpt.decoder.layers, strict=True)
    for block, other in layers:
        for name in ("linear_fc1", "linear_fc2"):
            loop = [getattr(expert, name).weight.grad for expert in other.mlp.experts.local_experts]
            expected = torch.stack(loop) / len(logprobs)
            assert expected.abs().max() > 1e-4
            own = getattr(block.mlp.experts, name).weight.main_grad
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
