"""Slurm's commands as programs of a test, with the test's answers."""

import os
from pathlib import Path

import pytest

from tests.support.commands import write_program


class ScriptedSlurm:
    """A folder of programs that stand before all others, and note how they are called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "scripted_slurm"
        self._folder.mkdir()
        self._state = self._folder / "state"
        self._calls = self._folder / "calls"
        monkeypatch.setenv("PATH", f"{self._folder}:{os.environ['PATH']}")

    def answer(self, command: str, script: str) -> None:
        """Have a command run a script of bash.

        In it `$STATE` is the file of the job's state, `$CALLS` that of all calls, with this one.
        """
        prelude = f'STATE={self._state} CALLS={self._calls}\necho "{command} $*" >> {self._calls}\n'
        write_program(self._folder / command, prelude + script)

    def answer_about_jobs(self, *actions: str) -> None:
        """Have `scontrol show job` tell the job's state, and do nothing else but these `actions`.

        An action is a pattern of a case in bash and a command: `release) echo RUNNING > $STATE`.
        """
        shown = "ExcNodeList=(null) EndTime=Unknown PreemptTime=None Requeue=1"
        cases = (f'show) echo "JobId=7 JobState=$(cat $STATE) {shown}"', *actions)
        self.answer("scontrol", f"case $1 in {';;'.join(cases)};; esac")

    def list_running(self, *job_ids: str) -> None:
        """Make squeue list these jobs as running, and no others."""
        row = "$id|RUNNING|None|n01|N/A|N/A|0|0|||"
        query = f'case ",${{@: -1}}," in *[=,]$id,*) echo "{row}";; esac'
        self.answer("squeue", f"for id in {' '.join(job_ids)}; do {query}; done")

    @property
    def state(self) -> str:
        return self._state.read_text().strip()

    @state.setter
    def state(self, state: str) -> None:
        self._state.write_text(state)

    def list_calls(self, beginning: str = "") -> list[str]:
        """The calls so far that begin like this, oldest first."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [call for call in calls if call.startswith(beginning)]
