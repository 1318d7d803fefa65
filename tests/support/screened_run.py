"""A run in the foreground, watched by its screen, and the lines of agents with mistakes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from areal_hpc.rundir.paths import RunPaths
from tests.support import broken_agents
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.small_run import processes_of
from tests.support.waiting import wait_for

MAX_DELAY_S = scaled(2.0)
"""From an event to its line on the screen."""
END_TIMEOUT_S = 150.0


class ScreenedRun:
    """A run in the foreground, and each line of its screen with the time at which it came."""

    def __init__(
        self, folder: Path, agent: type, *overrides: str, program: str, environ: dict[str, str]
    ) -> None:
        self.paths = RunPaths(folder / "quickstart" / "demo")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", program, "run"),
                *("recipes/quickstart.yaml", f"cluster.fileroot={folder}", *overrides),
                f"rollout.workflow=tests.support.broken_agents.{agent.__name__}",
            ],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def screen(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def find(self, start: str) -> tuple[float, str] | None:
        """The first line that begins so, and when it came."""
        return next((one for one in self.lines if one[1].startswith(start)), None)

    def await_line(self, start: str) -> tuple[float, str]:
        def found() -> bool:
            assert self.process.poll() is None or self.find(start), self.screen
            return self.find(start) is not None

        wait_for(found, END_TIMEOUT_S, lambda: self.screen)
        line = self.find(start)
        assert line is not None
        return line

    def end(self) -> int:
        code = self.process.wait(scaled(END_TIMEOUT_S))
        self._reader.join(scaled(10.0))
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def stop(self) -> None:
        """End it, if it has not ended; no process of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.end()
        self.await_no_process()

    def await_no_process(self) -> None:
        wait_for(lambda: processes_of(self.paths.root) == [], 30.0)


def line_of(agent: type, text: str = "async def run") -> str:
    """`FILE:LINE` of the first line of an agent that has a text."""
    file = Path(broken_agents.__file__)
    lines = file.read_text().splitlines()
    first = lines.index(f"class {agent.__name__}:")
    return f"{file}:{next(at for at, line in enumerate(lines[first:], first + 1) if text in line)}"
