"""Processes of the jobs under test."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.starts import read_own_stop_note, record_checkpoint_duration


class IdleAgent:
    """An agent that asks nothing: loading it costs next to nothing."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 0.0


def _note(config: dict[str, str], word: str) -> None:
    with Path(config["file"]).open("a") as stream:
        stream.write(f"{word}\n")


def _begin(config: dict[str, str]) -> None:
    start, host = os.environ["AREAL_HPC_JOB_START"], os.environ["AREAL_HPC_HOST"]
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 INFO works", flush=True)
    _note(config, f"began {start} at {host}")


def steady(config: dict[str, str]) -> None:
    """Work until all is done, or until a signal to stop; then save, which takes a while."""

    def save(number: int, frame: object) -> None:
        time.sleep(0.5)
        _note(config, f"saved {os.environ['AREAL_HPC_RANK']}")
        raise SystemExit("saved")

    signal.signal(signal.SIGTERM, save)
    _begin(config)
    while not Path(config["go"]).exists():
        time.sleep(0.1)
    _note(config, "done")


def deaf(config: dict[str, str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _begin(config)
    time.sleep(600)


def hungry(config: dict[str, str]) -> None:
    _begin(config)
    print(len([b"x" * (64 << 20) for _ in range(32)]))


def failing(config: dict[str, str]) -> None:
    _begin(config)
    if os.environ["AREAL_HPC_RANK"] == "1":
        raise ValueError("the loss is not a number")
    time.sleep(600)


def show_gpus(config: dict[str, str]) -> None:
    rank = os.environ["AREAL_HPC_RANK"]
    _note(config, f"task {rank} has GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")


def slow_saver(config: dict[str, str]) -> None:
    """Announce a save of eight seconds; at a signal to stop, note the time that is left."""
    record_checkpoint_duration(8.0)

    def look(number: int, frame: object) -> None:
        _note(config, "stopped")
        while (note := read_own_stop_note()) is None:
            time.sleep(0.1)
        _note(config, f"{note.reason}: {note.grace_s:.0f} s")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, look)
    _begin(config)
    time.sleep(600)


def crash(config: dict[str, str]) -> None:
    if os.environ["AREAL_HPC_JOB_START"] == "1":
        Path(config["progress"]).write_text("a step\n")
    _note(config, f"crashed {os.environ['AREAL_HPC_JOB_START']}")
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(config: dict[str, str]) -> None:
    """End as for a mistake in the recipe."""
    _note(config, "refused")
    raise RecipeError("the shoe does not fit")


def idle_once(config: dict[str, str]) -> None:
    _begin(config)
    if os.environ["AREAL_HPC_JOB_START"] == "1":
        raise SystemExit(79)


def finish(config: dict[str, str]) -> None:
    _note(config, f"done on {os.environ['SLURMD_NODENAME']}")


def dying_rank(config: dict[str, str]) -> None:
    """Die as the second rank of the first start of the job, once the other one waits."""
    _begin(config)
    if os.environ["AREAL_HPC_JOB_START"] == "1":
        if os.environ["AREAL_HPC_RANK"] == "1":
            _await_all_begun(config)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    _note(config, "done")


def _await_all_begun(config: dict[str, str]) -> None:
    while len(Path(config["file"]).read_text().splitlines()) % 2:
        time.sleep(0.05)
