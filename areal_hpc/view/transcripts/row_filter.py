"""Filters of recorded rows (`--where`), as conditions of SQLite.

    expression = term {"or" term}
    term       = factor {"and" factor}
    factor     = "not" factor | "(" expression ")" | field operator value
    operator   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    value      = a number, a word, or a text in quotes

`~` asks whether a text contains another one, without regard to case. A field that a row lacks
compares as unequal to everything.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from areal_hpc.errors import RecipeError

SqlValue = float | str
NAMED_PREFIXES = ("part.", "metric.")
"""Of parts and metrics of rewards, whose names agents choose."""
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
MAX_NESTED_LEVELS = 50
_TOKEN_PATTERN = re.compile(
    r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<symbol><=|>=|!=|==|[()=<>~])|(?P<word>[^\s()=<>~!"']+))"""
)
_SQL_OPERATOR_BY_SIGN = {"=": "=", "!=": "IS NOT", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_SIGNS = " ".join((*_SQL_OPERATOR_BY_SIGN, "~"))


class SqlCondition(NamedTuple):
    sql: str
    """0 or 1 for every row."""
    values: list[SqlValue]
    """In the places of its `?`."""


class _Token(NamedTuple):
    text: str
    is_quoted: bool = False


def get_field_type(field: str) -> type[float] | type[str] | None:
    return float if field.startswith(NAMED_PREFIXES) else TYPE_BY_FIELD.get(field)


def get_column_sql(field: str) -> tuple[str, list[str]]:
    """The value of a field as SQL, and the values in the places of its `?`."""
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
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._level = text, 0
        if len(text) > MAX_EXPRESSION_CHARS:
            self._fail(f"expected at most {MAX_EXPRESSION_CHARS} characters, got {len(text)}")
        self._tokens = self._tokenize()

    def _tokenize(self) -> list[_Token]:
        tokens, at, text = [], 0, self._text.rstrip()
        while at < len(text):
            match = _TOKEN_PATTERN.match(text, at)
            if match is None:
                self._fail(f"unexpected {text[at:].lstrip()[:20]!r}")
            quoted = match["quoted"]
            tokens.append(_Token(quoted[1:-1], True) if quoted else _Token(match[0].strip()))
            at = match.end()
        return tokens

    def parse(self) -> SqlCondition:
        if not self._tokens:
            self._fail("expected a comparison, got nothing")
        condition = self._parse_expression()
        if self._tokens:
            self._fail(f"expected `and`, `or` or the end, got {self._tokens[0].text!r}")
        return condition

    def _parse_expression(self) -> SqlCondition:
        return self._parse_list("or", self._parse_term)

    def _parse_term(self) -> SqlCondition:
        return self._parse_list("and", self._parse_factor)

    def _parse_list(self, word: str, parse_part: Callable[[], SqlCondition]) -> SqlCondition:
        parts = [parse_part()]
        while self._take_word_if_next(word):
            parts.append(parse_part())
        sql = f" {word.upper()} ".join(f"({part.sql})" for part in parts)
        return SqlCondition(sql, [value for part in parts for value in part.values])

    def _parse_factor(self) -> SqlCondition:
        self._level += 1
        if self._level > MAX_NESTED_LEVELS:
            self._fail(f"expected at most {MAX_NESTED_LEVELS} levels of `not` and parentheses")
        try:
            if self._take_word_if_next("not"):
                sql, values = self._parse_factor()
                return SqlCondition(f"NOT ({sql})", values)
            if self._take_word_if_next("("):
                inner = self._parse_expression()
                if not self._take_word_if_next(")"):
                    self._fail("a parenthesis is not closed")
                return inner
            return self._parse_comparison()
        finally:
            self._level -= 1

    def _parse_comparison(self) -> SqlCondition:
        field = self._pop_token("a field").text
        kind = get_field_type(field)
        if kind is None:
            self._fail(f"there is no field {field!r}")
        sign = self._pop_token(f"one of {_SIGNS} after {field}").text.replace("==", "=")
        if sign != "~" and sign not in _SQL_OPERATOR_BY_SIGN:
            self._fail(f"expected one of {_SIGNS} after {field}, got {sign!r}")
        wanted = self._pop_token(f"a value after {field} {sign}").text
        if kind is str and sign not in ("=", "!=", "~"):
            self._fail(f"{field} is a text, which takes =, != or ~, got {sign}")
        if kind is float and sign == "~":
            self._fail(f"{field} is a number: `~` is for texts")
        column, values = get_column_sql(field)
        if sign == "~" or field == "text":
            wanted = wanted.casefold()
        if sign == "~":
            text = column if field == "text" else f"casefold({column})"
            sql = f"instr({text}, ?) > 0"
        else:
            sql = f"{column} {_SQL_OPERATOR_BY_SIGN[sign]} ?"
        try:
            value = float(wanted) if kind is float else wanted
        except ValueError:
            self._fail(f"{field} is a number, got {wanted!r}")
        # A field that a row lacks compares as unequal to everything.
        return SqlCondition(f"COALESCE({sql}, 0)", [*values, value])

    def _take_word_if_next(self, text: str) -> bool:
        if self._tokens and self._tokens[0] == _Token(text):
            del self._tokens[0]
            return True
        return False

    def _pop_token(self, expected: str) -> _Token:
        if not self._tokens:
            self._fail(f"expected {expected}, got the end")
        return self._tokens.pop(0)

    def _fail(self, problem: str) -> NoReturn:
        raise RecipeError(
            f"{problem}, in {self._text[:200]!r}",
            key="--where",
            hint='compare fields, such as "step=20 and reward<0.5"; '
            f"there are {', '.join(FIELD_NAMES_FOR_HELP)}",
        )
