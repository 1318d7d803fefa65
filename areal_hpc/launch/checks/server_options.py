"""Check of `inference.extra_args` by SGLang's own parser, where SGLang is installed."""

import difflib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_hpc.errors import Problem
from areal_hpc.launch.role_python import RolePythonError, ask_role
from areal_hpc.recipe.recipe import Recipe

log = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "inference.extra_args"
OPTION_CHECK_MODULE = "areal_hpc.inference.option_check"
PARSER_TIMEOUT_S = 600.0
"""SGLang takes 4 to 11 s to import, minutes from cold storage or on a busy node."""


class CommandReading(msgspec.Struct):
    unknown: list[str]
    """Words that it does not know, values of unknown options too."""
    complaint: str
    """Why it cannot be read at all."""


class OptionReport(msgspec.Struct):
    known: list[str]
    readings: list[CommandReading]


def ask_sglang_to_parse_options(python: str, lines: Sequence[Sequence[str]]) -> OptionReport | None:
    """Its reading of command lines; None if SGLang cannot be imported on this machine."""
    checkout = str(Path(__file__).resolve().parents[3])
    environ = {**os.environ, "PYTHONPATH": checkout, "SGLANG_USE_CPU_ENGINE": "1"}
    program = ("-m", OPTION_CHECK_MODULE)
    try:
        answer = ask_role(
            python, *program, request=lines, environ=environ, timeout_s=PARSER_TIMEOUT_S
        )
    except RolePythonError as error:
        log.info("SGLang was not asked about its options: %s", error)
        return None
    return msgspec.convert(answer, OptionReport)


def find_extra_args_problems(recipe: Recipe, python: str) -> Iterator[Problem]:
    """Problems of the recipe's further options for SGLang; takes seconds if there are any."""
    arguments = recipe.inference.extra_args
    if not arguments:
        return
    report = ask_sglang_to_parse_options(python, [["--model-path", "model", *arguments]])
    if report is not None:
        yield from find_option_problems(arguments, report.readings[0], report.known)


def find_option_problems(
    arguments: Sequence[str], reading: CommandReading, known_options: Sequence[str]
) -> Iterator[Problem]:
    """What is wrong with options, as SGLang read them. Pure."""
    if reading.complaint:
        yield Problem(
            f"SGLang cannot read {' '.join(arguments)!r}: {reading.complaint}",
            EXTRA_ARGS_KEY,
            "write an option and its value as two entries of the list",
        )
    options = [word.partition("=")[0] for word in reading.unknown if word.startswith("-")]
    for option in options:
        near = difflib.get_close_matches(option, known_options, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        yield Problem(f"SGLang has no option {option}", EXTRA_ARGS_KEY, hint)
    if reading.unknown and not options:
        yield Problem(
            f"SGLang expects an option, got {reading.unknown[0]!r}",
            EXTRA_ARGS_KEY,
            "write an option and its value as two entries of the list",
        )
