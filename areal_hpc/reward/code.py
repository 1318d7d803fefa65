"""Answers that are programs, judged by running tests."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.reward.answer_extraction import extract_code
from areal_hpc.reward.judging.judge import passes_tests
from areal_hpc.sandbox.process import ProgramLimits, run_program


def code_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    tests: Mapping[str, Any],
    **task: Any,
) -> float:
    """1.0 if the last fenced block of Python passes every test, else 0.0.

    Of `tests`, `{"program": source}` calls what the answer defines and must end without an error;
    `{"cases": [{"input": ..., "output": ...}]}` are read and printed by the answer.
    `{"time_s": ..., "memory_bytes": ...}` beside them change the limits of each run. An answer's
    functions get copies of their arguments; `{"arguments_change": true}` beside a `program` says
    that it tests what becomes of its own, as of a list that is to be sorted in place.

    An answer runs in a sandbox and sees neither tests nor expected outputs: a `program` runs in
    another process and calls it over a socket, which carries literals alone.

    Raises:
        RecipeError: This machine cannot isolate programs, and `reward.isolation` is not none.
        ClusterError: A sandbox could not be started.
    """
    source = extract_code(completions)
    if source is None:
        return 0.0
    wanted = {name: tests[name] for name in ("time_s", "memory_bytes") if name in tests}
    limits = ProgramLimits(**wanted)
    if "program" in tests:
        changes = bool(tests.get("arguments_change"))
        return float(passes_tests(source, tests["program"], limits, arguments_change=changes))
    for case in tests["cases"]:
        outcome = run_program(source, case["input"], limits)
        if outcome.exit_code != 0 or _normalize_output_lines(
            outcome.stdout
        ) != _normalize_output_lines(case["output"]):
            return 0.0
    return float(bool(tests["cases"]))


def _normalize_output_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
