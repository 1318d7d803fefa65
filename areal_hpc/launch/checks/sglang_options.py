"""Checks of the recipe's parsers and further options by the SGLang of the serving Python."""

import ast
import difflib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_hpc.errors import Problem
from areal_hpc.launch.role_python import RolePythonError, ask_role, describe_python
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.inference import InferenceConfig

log = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "inference.extra_args"
OPTION_CHECK_MODULE = "areal_hpc.inference.option_check"
OPTION_CHECK_TIMEOUT_S = 600.0
"""SGLang takes 4 to 11 s to import, minutes from cold storage or on a busy node."""
_PARSER_TABLES = {
    "tool_call_parser": ("srt/function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("srt/parser/reasoning_parser.py", "DetectorMap"),
}
"""Key of `inference` -> file below sglang/ and the name of the table in it, as in SGLang 0.5.23."""


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
            python, *program, request=lines, environ=environ, timeout_s=OPTION_CHECK_TIMEOUT_S
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
    """Problems of options, as SGLang read them. Pure."""
    two_entries = "write an option and its value as two entries of the list"
    if reading.complaint:
        message = f"SGLang cannot read {' '.join(arguments)!r}: {reading.complaint}"
        yield Problem(message, EXTRA_ARGS_KEY, two_entries)
    options = [word.partition("=")[0] for word in reading.unknown if word.startswith("-")]
    for option in options:
        near = difflib.get_close_matches(option, known_options, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        yield Problem(f"SGLang has no option {option}", EXTRA_ARGS_KEY, hint)
    if reading.unknown and not options:
        message = f"SGLang expects an option, got {reading.unknown[0]!r}"
        yield Problem(message, EXTRA_ARGS_KEY, two_entries)


def find_parser_name_problems(inference: InferenceConfig, python: str) -> Iterator[Problem]:
    """Parsers that the SGLang of an interpreter does not have; none where it has no SGLang.

    Their names are read from SGLang's source: to import it takes seconds.
    """
    named = {key: name for key in _PARSER_TABLES if (name := getattr(inference, key))}
    if not named:
        return
    try:
        origin = describe_python(python, ["sglang"]).modules["sglang"]
    except (RolePythonError, KeyError):
        return
    for key, name in named.items():
        file, table = _PARSER_TABLES[key]
        known = _read_keys(Path(origin).parent / file, table)
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            yield Problem(f"SGLang has no parser {name!r}", f"inference.{key}", hint)


def _read_keys(source: Path, table: str) -> list[str]:
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError):
        return []
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)) if (
                name == table
            ):
                return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []
