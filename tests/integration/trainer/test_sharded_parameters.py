"""FSDP2 never leaves a complete network on a rank, and keeps the numbers the same."""

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from areal_hpc.recipe.sections.trainer import AdamConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.families.architecture import Architecture, parse_architecture
from areal_hpc.trainer.model.families.weight_map import HfTensorSpec, list_parameter_maps
from areal_hpc.trainer.model.hf_weights import load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_network, build_policy
from areal_hpc.trainer.model.sharding import shard_decoder
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.step import make_micro_batches_of_this_rank, score_rows, train_step
from tests.support.layout_worker import CHANNELS, make_rows, weighted_loss
from tests.support.rank_server import RankServer
from tests.support.reference_models import SIZES, TRANSFORMERS_CONFIGS

CPU = torch.device("cpu")
TRAINER = {"parallel": {"dp": 2}}
DIVIDED = ParallelConfig(dp=2, shard_parameters=True)


def parse(family: str, **sizes: Any) -> Architecture:
    kind, options = TRANSFORMERS_CONFIGS[family]
    config = getattr(transformers, kind)(**SIZES | options | sizes, pad_token_id=0)
    return parse_architecture(config.to_dict(), family)


def draw(tensor: HfTensorSpec, part: tuple[slice, ...]) -> torch.Tensor:
    torch.manual_seed(sum(tensor.name.encode()))
    return (torch.rand(tensor.shape) - 0.5)[part]


def build_whole_first(arch: Architecture, dtype: torch.dtype) -> TrainedNetwork:
    """Allocate every parameter, then divide them."""
    network = build_network(arch, ParallelConfig(dp=2), dtype, CPU)
    shard_decoder(network.gpt, dtype, CPU)
    return TrainedNetwork(
        arch=arch,
        gpt=network.gpt,
        dtype=dtype,
        device=CPU,
        split=network.split,
        rope_frequencies=network.rope_frequencies,
        ddp_module=None,
    )


def build_by_parts(arch: Architecture, dtype: torch.dtype) -> TrainedNetwork:
    return build_policy(arch, DIVIDED, dtype, CPU)


def get_own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# One embedding for both ends, with rows that two ranks do not share evenly, and buffers by kind of
# layer; stacked experts with a bias that is no parameter.
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_a_rank_that_fills_its_own_rows_computes_what_a_divided_whole_does(
    ranks: RankServer, tmp_path: Path, family: str
) -> None:
    outcome = ranks.call(compare_both_ways, RunPaths(tmp_path), 2, family=family, trainer=TRAINER)
    assert outcome.codes == [0, 0], outcome.log


def compare_both_ways(scenario: dict[str, Any], paths: RunPaths) -> None:
    arch = parse(scenario["family"])
    states, scores = [], []
    for build in (build_by_parts, build_whole_first):
        policy = build(arch, torch.float32)
        load_hf(policy, draw)
        optimizer = build_optimizer(policy, AdamConfig(lr=1e-3))
        batches = make_micro_batches_of_this_rank(policy, make_rows(2), CHANNELS, max_tokens=90)
        train_step(policy, optimizer, batches, weighted_loss, 1e-3)
        named = [*policy.gpt.named_parameters(), *policy.gpt.named_buffers()]
        states.append({name: get_own_part(tensor) for name, tensor in named})
        scores.append(score_rows(policy, make_rows(1), minibatch_count=1, max_tokens=90))
    by_parts, whole_first = states
    assert by_parts.keys() == whole_first.keys()
    assert any("inv_freq" in name for name in by_parts)
    for name, tensor in by_parts.items():
        assert torch.equal(tensor, whole_first[name]), name
    for before, after in zip(*scores, strict=True):
        assert before.tobytes() == after.tobytes()


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 40, "head_dim": 64}
"""Some 42 million parameters in small layers."""


@pytest.mark.parametrize(("way", "fits"), [("build_by_parts", True), ("build_whole_first", False)])
def test_no_rank_allocates_a_whole_network(
    ranks: RankServer, tmp_path: Path, way: str, fits: bool
) -> None:
    outcome = ranks.call(fill_in_limited_memory, RunPaths(tmp_path), 2, way=way, trainer=TRAINER)
    assert (outcome.codes == [0, 0]) == fits, outcome.log
    assert fits or "can't allocate memory" in outcome.log


def fill_in_limited_memory(scenario: dict[str, Any], paths: RunPaths) -> None:
    arch = parse("mistral", **WIDE)
    build_policy(parse("mistral"), DIVIDED, torch.float32, CPU)  # makes the lasting objects
    build: Callable[..., TrainedNetwork] = globals()[scenario["way"]]
    with limit_memory(int(0.8 * count_bytes(arch))):
        policy = build(arch, torch.float32)
        load_hf(policy, draw)
    assert all(isinstance(parameter, DTensor) for parameter in policy.gpt.parameters())


def count_bytes(arch: Architecture) -> int:
    shapes = (parameter.shape for parameter in list_parameter_maps(arch))
    return sum(4 * torch.Size(shape).numel() for shape in shapes)


M_MMAP_THRESHOLD = -3
"""Option of malloc.h: larger blocks are mapped each by itself."""


@contextmanager
def limit_memory(more_bytes: int) -> Iterator[None]:
    """Allow this process so much more memory, touched or not."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory leaves no holes
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    held_bytes = 1024 * int(fields["VmData"].removesuffix("kB"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
