"""Verdict on an answer by tests that call it, each of the two in a sandbox of its own."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.sandbox.process import (
    ProgramLimits,
    ProgramResult,
    SandboxedProcess,
    get_configured_isolation,
)

_SCRIPTS_FOLDER = Path(__file__).parent
_PASSED = "passed"
"""As `judge_main.py` prints it."""


def passes_tests(
    answer: str, tests: str, limits: ProgramLimits, *, arguments_change: bool = False
) -> bool:
    """True if the tests, a Python program that uses names of the answer, run without an error.

    The answer never sees the tests: it gets copies of the arguments of one call after the other.
    `arguments_change`: what it does to lists, dicts and sets among them is done to the tests' too.

    Raises:
        RecipeError: This machine cannot isolate programs, and `reward.isolation` is not none.
        ClusterError: A process could not be started.
    """
    outcome = run_tests(answer, tests, limits, arguments_change=arguments_change)
    lines = outcome.stdout.splitlines()
    return outcome.exit_code == 0 and not outcome.timed_out and lines[-1:] == [_PASSED]


def run_tests(
    answer: str, tests: str, limits: ProgramLimits, *, arguments_change: bool = False
) -> ProgramResult:
    """How the tests' process ended, and what it printed.

    Raises: see `passes_tests`.
    """
    isolation = get_configured_isolation()
    options = json.dumps({"arguments_change": arguments_change})
    answers_end, tests_end = socket.socketpair()
    with answers_end, tests_end:
        judged = SandboxedProcess(
            _build_program_files("answer_main.py", {"answer.py": answer}),
            limits,
            isolation,
            channel_fd=answers_end.fileno(),
            keeps_output=False,
        )
        try:
            judge = SandboxedProcess(
                _build_program_files("judge_main.py", {"tests.py": tests, "options.json": options}),
                limits,
                isolation,
                channel_fd=tests_end.fileno(),
            )
            answers_end.close()  # each process alone holds its end now
            tests_end.close()
            outcome = judge.communicate(watched_processes=[judged])
        finally:
            judged.kill()
    judged.require_begun()
    return outcome


def _build_program_files(main: str, texts: Mapping[str, str]) -> dict[str, bytes]:
    scripts = {script: (_SCRIPTS_FOLDER / script).read_bytes() for script in (main, "literals.py")}
    return scripts | {name: text.encode(errors="replace") for name, text in texts.items()}
