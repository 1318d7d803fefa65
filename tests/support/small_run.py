"""A run of the quick-start recipe, cut down to seconds: the real stack, little of it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import PROGRAM, audit_of
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.process_commands import command_of, find_processes
from tests.support.run_files import logs_of
from tests.support.waiting import wait_for

TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0

WITHOUT_SETS = ("evaluation.sets.longer=null", "evaluation.sets.sampled=null")
"""The quick start with no evaluation sets but `valid`."""
SIZES = (
    *WITHOUT_SETS,
    "train_dataset.kwargs.size=64",
    "valid_dataset.kwargs.size=8",
    "sft.dataset.kwargs.size=640",
    "sft.batch_size=16",
    "sft.checkpoint_every_steps=20",
    "evaluation.tasks=8",
    "rollout.n_samples=4",
    "rollout.max_concurrent_rollouts=16",
    "trainer.batch_size=4",
)
"""Little of everything that the recipe has much of."""
CUT_DOWN = (
    *SIZES,
    "sft.total_steps=40",
    "evaluation.every_steps=2",
    "trainer.total_steps=3",
    "trainer.checkpoint_every_steps=1",
)


LIGHT_AGENT = "rollout.workflow=tests.support.sums.SumAgent"
LIGHT = (
    LIGHT_AGENT,
    *WITHOUT_SETS,
    "train_dataset.generator=tests.support.sums:tasks",
    "valid_dataset.generator=tests.support.sums:tasks",
)
"""Settings of a run that is not there to show the quick start's agent."""


def started_from(model: Path) -> tuple[str, ...]:
    """Overrides of a light run that starts from a model, without SFT."""
    return (*LIGHT, "sft=null", "model.tiny=null", f"model.path={model}")


class SmallRun:
    def __init__(self, fileroot: Path, *overrides: str) -> None:
        self.fileroot = fileroot
        self._overrides = (f"cluster.fileroot={fileroot}", *CUT_DOWN, *overrides)
        self.paths = RunPaths(fileroot / "quickstart" / "demo")
        self.log = fileroot / "launcher.log"
        fileroot.mkdir(parents=True, exist_ok=True)
        self.environ: dict[str, str] = {}
        """Added to the environment of the command."""
        self.before: tuple[str, ...] = ()
        """Words before the command."""
        self.process: subprocess.Popen[bytes] | None = None

    def override(self, *overrides: str) -> None:
        self._overrides = (*self._overrides, *overrides)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.before, *PROGRAM, "run", "recipes/quickstart.yaml", *self._overrides],
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code. A run that is not over by then is stopped, and the test fails."""
        assert self.process is not None
        try:
            return self.process.wait(scaled(timeout_s))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(scaled(STOP_TIMEOUT_S))
            raise AssertionError(
                f"not over after {scaled(timeout_s):.4g} s:\n{self.said()}"
            ) from None

    def finish(self) -> None:
        self.start()
        assert self.wait() == 0, self.said()

    def interrupt_when(self, condition: Callable[[], bool]) -> float:
        """Start, press Ctrl-C once `condition` holds; the seconds until the command returned."""
        self.start()
        self.await_true(condition)
        return self.press_ctrl_c()

    def press_ctrl_c(self) -> float:
        """SIGINT to the whole foreground group, as a terminal sends it; seconds to the end."""
        assert self.process is not None
        began = time.monotonic()
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.wait() == 130, self.said()
        return time.monotonic() - began

    def await_true(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        def is_reached() -> bool:
            assert self.process is not None
            if condition():
                return True
            assert self.process.poll() is None, self.said()
            return False

        wait_for(is_reached, timeout_s, self.said)

    def said(self) -> str:
        """Collect the launcher's output, and the end of every log of the newest attempt."""
        return f"{self.log.read_text(errors='replace')}\n{logs_of(self.paths)}"

    def audited(self) -> str:
        return audit_of(self.paths.root)

    def processes(self) -> list[str]:
        return processes_of(self.paths.root)


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of live processes that, or whose environment, mention the run directory."""
    return [" ".join(command_of(p)) for p in find_processes(run_dir, in_environment=True)]


def kill_all(launcher: subprocess.Popen[bytes] | subprocess.Popen[str], run_dir: Path) -> None:
    launcher.kill()
    launcher.wait()
    for process in find_processes(run_dir, in_environment=True):
        with suppress(psutil.Error):
            process.kill()
    wait_for(lambda: processes_of(run_dir) == [], 60, lambda: processes_of(run_dir))


def await_none_left(run: SmallRun, timeout_s: float) -> None:
    wait_for(lambda: run.processes() == [], timeout_s, run.processes)


@contextmanager
def interrupted_at_end(run: SmallRun) -> Iterator[None]:
    """A block after which the run is at work no more, however the block ends."""
    try:
        yield
    finally:
        if run.process is not None and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            run.wait()
