"""Check of the names of SGLang's parsers, read from its source: to import it takes seconds."""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from areal_hpc.errors import Problem
from areal_hpc.launch.role_python import RolePythonError, describe_python
from areal_hpc.recipe.sections.inference import InferenceConfig

_PARSER_TABLES = {
    "tool_call_parser": ("srt/function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("srt/parser/reasoning_parser.py", "DetectorMap"),
}
"""Key of `inference` -> file below sglang/ and the name of the table in it, as in SGLang 0.5.23."""


def find_parser_name_problems(inference: InferenceConfig, python: str) -> Iterator[Problem]:
    """Parsers that the SGLang of an interpreter does not have; none where it has no SGLang."""
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
