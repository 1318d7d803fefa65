"""Reward for answers that are Python programs, by tests in sandboxes."""

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.reward.answer_extraction import extract_code
from areal_hpc.sandbox.program import (
    ProgramLimits,
    run_in_own_loop,
    run_program,
    run_python,
    start_program_sandbox,
)

_SCRIPTS_FOLDER = Path(__file__).parent / "judging"
_PASSED = "passed"
"""Last line of `judge_main.py` after all tests have passed."""


def code_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    tests: Mapping[str, Any],
    **task: Any,
) -> float:
    """Return 1.0 if the last fenced block of Python passes every test, else 0.0.

    `tests` is `{"program": source}`, which calls the names that the answer defines and must end
    without an error; or `{"cases": [{"input": ..., "output": ...}]}` for standard input and output.
    `time_s` and `memory_bytes` beside them change the limits of each run. An answer's functions get
    copies of their arguments; with `{"arguments_change": true}` beside a `program` their changes
    are applied to the originals, as for a function that sorts a list in place.

    An answer runs in a sandbox and sees neither tests nor expected outputs: a `program` runs in
    another sandbox and calls it over a socket, which carries only literals.

    Raises:
        RecipeError: This machine cannot isolate programs, and `reward.isolation` is not none.
        ClusterError: A sandbox could not be started.
    """
    source = extract_code(completions)
    if source is None:
        return 0.0
    limit_values = {name: tests[name] for name in ("time_s", "memory_bytes") if name in tests}
    limits = ProgramLimits(**limit_values)
    if "program" in tests:
        changes = bool(tests.get("arguments_change"))
        return float(passes_tests(source, tests["program"], limits, arguments_change=changes))
    for case in tests["cases"]:
        outcome = run_program(source, case["input"], limits)
        printed = _normalize_output_lines(outcome.stdout)
        if outcome.exit_code != 0 or printed != _normalize_output_lines(case["output"]):
            return 0.0
    return float(bool(tests["cases"]))


def passes_tests(
    answer: str, tests: str, limits: ProgramLimits, *, arguments_change: bool = False
) -> bool:
    """Return whether the tests, a program that uses names of the answer, run without an error.

    The answer never sees the tests, only copies of the arguments of one call after the other. With
    `arguments_change` its changes of lists, dicts and sets are applied to the tests' originals.

    Raises:
        RecipeError: This machine cannot isolate programs, and `reward.isolation` is not none.
        ClusterError: A process could not be started.
    """
    options = json.dumps({"arguments_change": arguments_change})
    answer_files = _build_program_files("answer_main.py", {"answer.py": answer})
    judge_files = _build_program_files(
        "judge_main.py", {"tests.py": tests, "options.json": options}
    )

    async def judge() -> bool:
        async with (
            start_program_sandbox(answer_files, limits) as judged,
            start_program_sandbox(judge_files, limits) as judging,
        ):
            answers_end, tests_end = (end.detach() for end in socket.socketpair())
            answer_task = asyncio.create_task(
                run_python(
                    judged, [*answer_files], limits, channel_fd=answers_end, keeps_output=False
                )
            )
            try:
                outcome = await run_python(judging, [*judge_files], limits, channel_fd=tests_end)
            finally:
                await judged.stop()
                await asyncio.wait({answer_task})
            answer_task.result()  # raises if the answer's process did not start
        lines = outcome.stdout.splitlines()
        return outcome.exit_code == 0 and not outcome.timed_out and lines[-1:] == [_PASSED]

    return run_in_own_loop(judge())


def _build_program_files(main: str, texts: Mapping[str, str]) -> dict[str, bytes]:
    scripts = {script: (_SCRIPTS_FOLDER / script).read_bytes() for script in (main, "literals.py")}
    return scripts | {name: text.encode(errors="replace") for name, text in texts.items()}


def _normalize_output_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
