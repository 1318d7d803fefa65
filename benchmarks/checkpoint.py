"""Measurement of the trainer's stall for a checkpoint: written by a thread, or in the step.

- beside: `CheckpointStore.begin` copies the state into host memory, the next step is trained while
  a thread writes and syncs it, and a poll after the step makes the checkpoint visible. The stall is
  what `begin` and the poll take.
- in process: the trainer itself writes and syncs the same files in the same format. The stall is
  the whole of it.

Every round takes a plain step, a step beside a checkpoint in the writing, and one in process.
Steps are made long enough by the number of rows. Figures are medians of the rounds; the state is
that of float32 training: weights and two moments.
"""

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from areal_hpc.trainer.model.cpu import megatron_cpu  # before anything of Megatron

# isort: split
from areal_hpc.rundir.checkpoints import (
    COMPLETE_MARKER_FILE,
    TRAINER_STATE_FILE,
    TrainerState,
    find_latest_checkpoint,
    get_rank_file_path,
    merge_rank_indices,
    write_checkpoint_index,
)
from areal_hpc.rundir.files import fsync_path, fsync_tree
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.checkpoints.rank_state import RankState
from areal_hpc.trainer.checkpoints.store import (
    CheckpointStore,
    CheckpointWriter,
    write_rank_file,
)
from benchmarks import _learning as learning
from benchmarks._pairs import add_out, report

SEED = 7
ROW_TOKENS = 512


@dataclass
class Rounds:
    """Seconds, round by round."""

    step: list[float] = field(default_factory=list)
    step_beside: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    poll: list[float] = field(default_factory=list)
    in_process: list[float] = field(default_factory=list)

    @property
    def stall(self) -> list[float]:
        return [copy + poll for copy, poll in zip(self.copy, self.poll, strict=True)]


def seconds_of(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def checkpoint_in_process(trainee: learning.Trainee, folder: Path, number: int) -> None:
    """Write and sync the same checkpoint in this process."""
    partial = folder / f".step_{number}"
    partial.mkdir()
    held, writer = RankState(trainee.policy, trainee.optimizer), CheckpointWriter()
    memory = writer.reserve_memory(held.size_bytes, trainee.policy.device)
    held.copy_to(memory)
    write_rank_file(memory[: held.size_bytes].numpy().data, get_rank_file_path(partial, 0))
    writer.close()
    write_checkpoint_index(
        partial,
        merge_rank_indices(
            [held.build_index(0)], held.types, held.read_optimizer_steps_over_all_ranks()[""]
        ),
    )
    state = TrainerState(step=number, generation=1, seed=SEED)
    (partial / TRAINER_STATE_FILE).write_bytes(msgspec.json.encode(state))
    (partial / COMPLETE_MARKER_FILE).touch()
    fsync_tree(partial)
    partial.rename(folder / partial.name.removeprefix("."))
    fsync_path(folder)


def measure(
    trainee: learning.Trainee, rows: Sequence[TrainingRow], folder: Path, rounds: int
) -> tuple[Rounds, int]:
    """Measure all rounds, after one that does not count; return the size of a checkpoint too."""
    store = CheckpointStore(folder / "beside", keep=2)
    alone = folder / "alone"
    alone.mkdir()
    times, state_bytes = Rounds(), 0
    for number in range(rounds + 1):
        state = TrainerState(step=number, generation=1, seed=SEED)
        step_s = seconds_of(lambda: trainee.step(rows))
        copy_s = seconds_of(partial(store.begin_save, trainee.policy, trainee.optimizer, state))
        beside_s = seconds_of(lambda: trainee.step(rows))
        poll_s = seconds_of(store.finish_save)
        in_process_s = seconds_of(partial(checkpoint_in_process, trainee, alone, number))
        checkpoint = find_latest_checkpoint(folder / "beside")
        assert checkpoint is not None
        state_bytes = sum(path.stat().st_size for path in checkpoint.path.iterdir())
        shutil.rmtree(alone / f"step_{number}")
        if number:
            times.step.append(step_s)
            times.step_beside.append(beside_s)
            times.copy.append(copy_s)
            times.poll.append(poll_s)
            times.in_process.append(in_process_s)
    store.close()
    return times, state_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--step-s", type=float, default=10.0, help="shortest step")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; a new folder in the working one"
    )
    add_out(parser, "checkpoint")
    arguments = parser.parse_args(argv)
    hidden = arguments.hidden
    sizes = learning.Sizes(
        "qwen3", hidden, arguments.layers, hidden // 64, hidden // 128, 3 * hidden, arguments.vocab
    )
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = learning.open_lone_world("cpu")
    model = learning.make_hf_model(sizes, device, torch.float32)
    trainee = learning.Trainee(model, device, torch.float32, 8 * ROW_TOKENS)
    del model
    generator = np.random.default_rng(SEED)

    def batch(count: int) -> list[TrainingRow]:
        return [learning.make_row(generator, ROW_TOKENS, sizes.vocab, 1.0) for _ in range(count)]

    gc.freeze()  # as the trainer does
    first = batch(8)
    trainee.step(first)
    row_s = min(seconds_of(lambda: trainee.step(first)) for _ in range(2)) / len(first)
    rows = batch(math.ceil(1.25 * arguments.step_s / row_s))
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd()) as folder:
        times, state_bytes = measure(trainee, rows, Path(folder), arguments.rounds)

    median = statistics.median
    print(f"\nstate {state_bytes / 1e6:.0f} MB, {len(rows)} rows of {ROW_TOKENS} tokens a step")
    print(f"{'seconds':<34}{'median':>8}{'min':>8}{'max':>8}")
    for name, held in {
        "a step": times.step,
        "a step beside a checkpoint": times.step_beside,
        "stall beside": times.stall,
        "  of it copying": times.copy,
        "  of it making it visible": times.poll,
        "stall in process": times.in_process,
    }.items():
        print(f"{name:<34}{median(held):>8.3f}{min(held):>8.3f}{max(held):>8.3f}")
    if median(times.step) < arguments.step_s:
        raise SystemExit(f"steps took {median(times.step):.1f} s: give a larger --step-s")
    pairs = list(zip(times.step, times.step_beside, times.stall, times.in_process, strict=True))
    figures = {
        "stall_s": median(times.stall),
        "step_s": median(times.step),
        "stall_over_step": median(stall / step for step, _, stall, _ in pairs),
        "state_bytes": float(state_bytes),
        "copy_s": median(times.copy),
        "in_process_s": median(times.in_process),
        "in_process_over_step": median(alone / step for step, _, _, alone in pairs),
        "step_beside_over_step": median(beside / step for step, beside, _, _ in pairs),
    }
    settings = {
        "model": learning.describe(sizes),
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rows": len(rows),
        "row_tokens": ROW_TOKENS,
        "rounds": arguments.rounds,
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()
