"""What the processes of the jobs under test do."""

import os
import signal
import time
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.starts import read_own_stop_notice
from areal_hpc.jobs.time_limit import record_checkpoint_time


def _note(config: dict[str, str], word: str) -> None:
    with Path(config["file"]).open("a") as stream:
        stream.write(f"{word}\n")


def steady(config: dict[str, str]) -> None:
    """Work until told to stop; then save, which takes a second."""

    def save(number: int, frame: object) -> None:
        time.sleep(1)
        _note(config, f"saved {os.environ['AREAL_HPC_RANK']}")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, save)
    _note(config, f"began {os.environ['AREAL_HPC_JOB_START']} at {os.environ['AREAL_HPC_HOST']}")
    while True:
        time.sleep(0.1)


def slow_saver(config: dict[str, str]) -> None:
    """Say that a save takes eight seconds; when told to stop, say how much time there is."""
    record_checkpoint_time(8.0)

    def look(number: int, frame: object) -> None:
        _note(config, "stopped")
        while (note := read_own_stop_notice()) is None:
            time.sleep(0.1)
        _note(config, f"{note.reason}: {note.kill_at - time.time():.0f} s")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, look)
    _note(config, "began")
    while True:
        time.sleep(0.1)


def crash(config: dict[str, str]) -> None:
    """Get further in the first start only, and crash in each."""
    if os.environ["AREAL_HPC_JOB_START"] == "1":
        Path(config["progress"]).write_text("a step\n")
    _note(config, f"crashed {os.environ['AREAL_HPC_JOB_START']}")
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(config: dict[str, str]) -> None:
    """End as for a mistake in the recipe."""
    _note(config, "refused")
    raise RecipeError("the shoe does not fit")


def idle_once(config: dict[str, str]) -> None:
    """Find nothing to do in the first start."""
    _note(config, f"began {os.environ['AREAL_HPC_JOB_START']}")
    if os.environ["AREAL_HPC_JOB_START"] == "1":
        raise SystemExit(79)


def finish(config: dict[str, str]) -> None:
    """Do the work."""
    _note(config, f"done on {os.environ['SLURMD_NODENAME']}")


def wait_to_go(config: dict[str, str]) -> None:
    """Work until it is told that all is done; a stop before that is answered with a save."""

    def save(number: int, frame: object) -> None:
        _note(config, "saved")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, save)
    _note(config, f"began {os.environ['AREAL_HPC_JOB_START']}")
    while not Path(config["go"]).exists():
        time.sleep(0.1)
    _note(config, "done")
