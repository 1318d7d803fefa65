"""Each rank keeps its own part of a checkpoint, and reads no other's when it resumes."""

import pytest
import torch
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.rundir.checkpoints import get_rank_file_path, read_checkpoint_index
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.private_apis.megatron_private import list_optimizer_shards
from tests.support.counted_reads import counted_reads
from tests.support.replay_worker import Scenario, begin_training, make_learner, state_of

FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
BYTES_PER_PARAMETER = 14


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("scenario", [BFLOAT16], indirect=True)
def test_each_of_four_ranks_holds_writes_and_reads_a_quarter(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths)
    checkpoint = paths.checkpoints_dir / "step_00000001"
    writer = learner.checkpoints._writer
    assert writer is not None
    whole = BYTES_PER_PARAMETER * sum(one.numel() for one in learner.policy.gpt.parameters())
    held = len(writer.reserve_memory(0, torch.device("cpu")))
    written = get_rank_file_path(checkpoint, dist.get_rank()).stat().st_size
    with counted_reads() as reads:
        make_learner(scenario, paths)
    for size in (held, written, sum(reads)):
        assert size == pytest.approx(whole / 4, rel=0.1)
    assert sum(reads) == written
    index = read_checkpoint_index(checkpoint)
    assert sum(index.compute_data_bytes(rank) for rank in range(4)) == whole
    files = [path.name for path in checkpoint.iterdir() if path.suffix == ".bin"]
    assert sorted(files) == [f"rank_0000{rank}.bin" for rank in range(4)]


def masters_of(learner: Learner) -> list[torch.Tensor]:
    return [shard.master.clone() for shard in list_optimizer_shards(learner._optimizer)]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("scenario", [FLOAT32, BFLOAT16], indirect=True, ids=str)
def test_a_run_goes_on_with_weights_of_another_type(scenario: Scenario, paths: RunPaths) -> None:
    """Master weights and moments stay; float32 weights are their own master weights."""
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    learner.checkpoints.close()
    scenario["trainer"] |= FLOAT32 if scenario["trainer"]["dtype"] == "bfloat16" else BFLOAT16
    resumed = make_learner(scenario, paths)
    for expected, found in zip(masters_of(learner), masters_of(resumed), strict=True):
        assert torch.equal(expected, found)
    for one, other in zip(
        list_optimizer_shards(learner._optimizer),
        list_optimizer_shards(resumed._optimizer),
        strict=True,
    ):
        assert all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)
    exact = dict(learner.policy.gpt.named_parameters())
    for name, parameter in resumed.policy.gpt.named_parameters():
        assert parameter.dtype == resumed.policy.dtype
        assert torch.allclose(parameter.float(), exact[name].float(), rtol=1e-2, atol=1e-6)


@pytest.mark.on_ranks(2)
def test_a_checkpoint_is_the_same_whoever_resumed_it(scenario: Scenario, paths: RunPaths) -> None:
    """Saved, resumed and saved again, every rank's file has the same bytes."""
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    file = get_rank_file_path(paths.checkpoints_dir / "step_00000002", dist.get_rank())
    before = file.read_bytes()
    learner.checkpoints.close()
    dist.barrier()
    resumed = make_learner(scenario, paths)
    assert state_of(resumed) == state_of(learner)
    resumed.begin_checkpoint({})
    resumed.checkpoints.finish_save()
    assert file.read_bytes() == before
