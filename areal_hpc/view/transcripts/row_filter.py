"""Filters of recorded rows (`--where`), as conditions of SQLite.

A filter is comparisons `FIELD SIGN VALUE`, joined by `and`, `or`, `not` and parentheses as in SQL.
A value is a number, a word, or a text in quotes. `~` holds if a text contains another one, without
regard to case. A field that a row lacks compares as unequal to everything.
"""

import re
import sqlite3
from contextlib import closing
from ctypes import c_double, c_float
from typing import NamedTuple

from areal_hpc.errors import RecipeError

SqlValue = float | str
NAMED_PREFIXES = ("part.", "metric.")
"""Prefixes of fields for parts and metrics of rewards, whose names agents choose."""
TYPE_BY_FIELD: dict[str, type[float] | type[str]] = {
    "kind": str,
    "step": float,
    "ticket": float,
    "attempt": float,
    "episode": float,
    "reward": float,
    "length": float,
    "tokens": float,
    "calls": float,
    "seconds": float,
    "task": float,
    "cell": str,
    "finish": str,
    "cause": str,
    "note": str,
    "text": str,
}
FIELD_NAMES_FOR_HELP = [*TYPE_BY_FIELD, *(f"{prefix}NAME" for prefix in NAMED_PREFIXES)]
MAX_EXPRESSION_CHARS = 2000
_COMPARISON_PATTERN = re.compile(
    r"""([^\s()=<>~!"']+)\s*(<=|>=|!=|==|[=<>~])\s*("[^"]*"|'[^']*'|[^\s()=<>~!"']+)"""
)
_JOINING_PATTERN = re.compile(r"\b(?:and|or|not)\b|[\s()]")
_SQL_OPERATOR_BY_SIGN = {"!=": "IS NOT", "==": "="}


class SqlCondition(NamedTuple):
    sql: str
    """Expression that is 0 or 1 for every row."""
    values: list[SqlValue]
    """Values for each `?`, in their order."""


def get_field_type(field: str) -> type[float] | type[str] | None:
    return float if field.startswith(NAMED_PREFIXES) else TYPE_BY_FIELD.get(field)


def get_column_sql(field: str) -> tuple[str, list[str]]:
    """Return the SQL of a field's value, and the values for each `?` in it."""
    if get_field_type(field) is None:
        hint = f"sort by one of {', '.join(FIELD_NAMES_FOR_HELP)}"
        raise RecipeError(f"there is no field {field!r}", key="--sort", hint=hint)
    if field.startswith(NAMED_PREFIXES):
        if '"' in field:
            raise RecipeError("names of parts and metrics have no quotes", key=field[:100])
        return "json_extract(named, ?)", [f'$."{field}"']
    if field == "text":  # a table of its own, with its case folded
        return "(SELECT text FROM texts WHERE texts.id = rows.id)", []
    return f'"{field}"', []


def compile_filter(text: str) -> SqlCondition:
    if len(text) > MAX_EXPRESSION_CHARS:
        length = f"expected at most {MAX_EXPRESSION_CHARS} characters, got {len(text)}"
        raise _build_filter_error(length, text)
    parts = _COMPARISON_PATTERN.split(text)  # joining text, field, sign, value, ...
    joining, comparisons = parts[::4], zip(parts[1::4], parts[2::4], parts[3::4], strict=True)
    if wrong := _JOINING_PATTERN.sub("", "".join(joining)):
        raise _build_filter_error(f"{wrong[:20]!r} is no comparison of a field with a value", text)
    sql, values = joining[0], list[SqlValue]()
    for comparison, after in zip(comparisons, joining[1:], strict=True):
        compiled = _compile_comparison(*comparison, text)
        sql += f" ({compiled.sql}) {after}"
        values += compiled.values
    try:  # SQLite checks how they are joined
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute("EXPLAIN SELECT " + " (1) ".join(joining))
    except sqlite3.Error as error:
        raise _build_filter_error(f"comparisons are joined wrongly ({error})", text) from error
    return SqlCondition(sql, values)


def _compile_comparison(field: str, sign: str, value: str, text: str) -> SqlCondition:
    kind, wanted = get_field_type(field), value.strip(value[0]) if value[0] in "\"'" else value
    if kind is None:
        raise _build_filter_error(f"there is no field {field!r}", text)
    if kind is str and sign not in ("=", "==", "!=", "~"):
        raise _build_filter_error(f"{field} is a text, which takes =, != or ~, got {sign}", text)
    if kind is float and sign == "~":
        raise _build_filter_error(f"{field} is a number: `~` is for texts", text)
    column, values = get_column_sql(field)
    if sign == "~" or field == "text":
        wanted = wanted.casefold()
    if sign == "~":
        sql = f"instr({column if field == 'text' else f'casefold({column})'}, ?) > 0"
    else:
        sql = f"{column} {_SQL_OPERATOR_BY_SIGN.get(sign, sign)} ?"
    try:
        number = c_float if field == "reward" else c_double  # shards hold rewards as float32
        compared = number(float(wanted)).value if kind is float else wanted
    except ValueError:
        raise _build_filter_error(f"{field} is a number, got {wanted!r}", text) from None
    # A field that a row lacks compares as unequal to everything.
    return SqlCondition(f"COALESCE({sql}, 0)", [*values, compared])


def _build_filter_error(problem: str, text: str) -> RecipeError:
    return RecipeError(
        f"{problem}, in {text[:200]!r}",
        key="--where",
        hint='compare fields, such as "step=20 and reward<0.5"; '
        f"there are {', '.join(FIELD_NAMES_FOR_HELP)}",
    )
