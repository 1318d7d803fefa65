"""Grammar of `--where`: comparisons of a row's fields, joined by `and`, `or`, `not`, parentheses.

    expression = term {"or" term}
    term       = factor {"and" factor}
    factor     = "not" factor | "(" expression ")" | field operator value
    operator   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    value      = a number, a word, or a text in quotes

`~` asks whether a text contains another one, without regard to case. A field that a row lacks
compares as unequal to everything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from areal_hpc.errors import RecipeError

FieldValue = float | str | None
"""Value of a field of one row; None where the row has none."""
MAX_EXPRESSION_CHARS = 2000
MAX_NESTED_LEVELS = 50
_TOKEN_PATTERN = re.compile(
    r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<symbol><=|>=|!=|==|[()=<>~])|(?P<word>[^\s()=<>~!"']+))"""
)
_COMPARE_BY_SIGN: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATOR_SIGNS = (*_COMPARE_BY_SIGN, "~")


class FieldReader(Protocol):
    """One row, whose fields are looked up by name."""

    def get_field(self, field_name: str) -> FieldValue:
        """The value of a field that `FindFieldType` knows."""
        ...


FindFieldType = Callable[[str], type[float] | type[str] | None]
"""Type of the field of a name; None if there is no such field."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field beside a value: a number if the field is one, else a text."""

    field: str
    sign: str
    """One of = != < <= > >= for numbers, = != ~ for texts."""
    wanted: float | str

    def holds(self, row: FieldReader) -> bool:
        """True if the row's value compares so."""
        value = row.get_field(self.field)
        if isinstance(self.wanted, str):
            if not isinstance(value, str):
                return self.sign == "!="
            if self.sign == "~":
                return self.wanted.casefold() in value.casefold()
            return (value == self.wanted) is (self.sign == "=")
        if not isinstance(value, int | float):
            return self.sign == "!="
        return _COMPARE_BY_SIGN[self.sign](value, self.wanted)


@dataclass(frozen=True, slots=True)
class Conjunction:
    """Holds where all of its terms do."""

    terms: tuple[Expression, ...]

    def holds(self, row: FieldReader) -> bool:
        return all(term.holds(row) for term in self.terms)


@dataclass(frozen=True, slots=True)
class Disjunction:
    """Holds where any of its terms does."""

    terms: tuple[Expression, ...]

    def holds(self, row: FieldReader) -> bool:
        return any(term.holds(row) for term in self.terms)


@dataclass(frozen=True, slots=True)
class Negation:
    """Holds where its term does not."""

    term: Expression

    def holds(self, row: FieldReader) -> bool:
        return not self.term.holds(row)


Expression = Comparison | Conjunction | Disjunction | Negation


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    is_quoted: bool = False


def parse_filter(text: str, types: FindFieldType, field_names: Sequence[str]) -> Expression:
    """What an expression says."""
    return _Parser(text, types, field_names).parse()


class _Parser:
    def __init__(self, text: str, types: FindFieldType, field_names: Sequence[str]) -> None:
        self._text, self._types, self._field_names = text, types, field_names
        self._level = 0
        if len(text) > MAX_EXPRESSION_CHARS:
            self._raise_filter_error(
                f"expected at most {MAX_EXPRESSION_CHARS} characters, got {len(text)}"
            )
        self._tokens = self._tokenize()

    def _tokenize(self) -> list[_Token]:
        tokens, at, text = [], 0, self._text.rstrip()
        while at < len(text):
            match = _TOKEN_PATTERN.match(text, at)
            if match is None:
                self._raise_filter_error(f"unexpected {text[at:].lstrip()[:20]!r}")
            quoted = match["quoted"]
            tokens.append(_Token(quoted[1:-1], True) if quoted else _Token(match[0].strip()))
            at = match.end()
        return tokens

    def parse(self) -> Expression:
        if not self._tokens:
            self._raise_filter_error("expected a comparison, got nothing")
        expression = self._parse_expression()
        if self._tokens:
            self._raise_filter_error(
                f"expected `and`, `or` or the end, got {self._tokens[0].text!r}"
            )
        return expression

    def _parse_expression(self) -> Expression:
        terms = [self._parse_term()]
        while self._take_word_if_next("or"):
            terms.append(self._parse_term())
        return terms[0] if len(terms) == 1 else Disjunction(tuple(terms))

    def _parse_term(self) -> Expression:
        factors = [self._parse_factor()]
        while self._take_word_if_next("and"):
            factors.append(self._parse_factor())
        return factors[0] if len(factors) == 1 else Conjunction(tuple(factors))

    def _parse_factor(self) -> Expression:
        self._level += 1
        if self._level > MAX_NESTED_LEVELS:
            self._raise_filter_error(
                f"expected at most {MAX_NESTED_LEVELS} levels of `not` and parentheses"
            )
        try:
            if self._take_word_if_next("not"):
                return Negation(self._parse_factor())
            if self._take_word_if_next("("):
                inner = self._parse_expression()
                if not self._take_word_if_next(")"):
                    self._raise_filter_error("a parenthesis is not closed")
                return inner
            return self._parse_comparison()
        finally:
            self._level -= 1

    def _parse_comparison(self) -> Comparison:
        field = self._pop_any_token_or_raise("a field").text
        kind = self._types(field)
        if kind is None:
            self._raise_filter_error(f"there is no field {field!r}")
        sign = self._pop_any_token_or_raise(
            f"one of {' '.join(_OPERATOR_SIGNS)} after {field}"
        ).text.replace("==", "=")
        if sign not in _OPERATOR_SIGNS:
            self._raise_filter_error(
                f"expected one of {' '.join(_OPERATOR_SIGNS)} after {field}, got {sign!r}"
            )
        wanted = self._pop_any_token_or_raise(f"a value after {field} {sign}").text
        if kind is str:
            if sign not in ("=", "!=", "~"):
                self._raise_filter_error(f"{field} is a text, which takes =, != or ~, got {sign}")
            return Comparison(field, sign, wanted)
        if sign == "~":
            self._raise_filter_error(f"{field} is a number: `~` is for texts")
        try:
            return Comparison(field, sign, float(wanted))
        except ValueError:
            self._raise_filter_error(f"{field} is a number, got {wanted!r}")

    def _take_word_if_next(self, text: str) -> bool:
        if self._tokens and self._tokens[0] == _Token(text):
            del self._tokens[0]
            return True
        return False

    def _pop_any_token_or_raise(self, expected: str) -> _Token:
        if not self._tokens:
            self._raise_filter_error(f"expected {expected}, got the end")
        return self._tokens.pop(0)

    def _raise_filter_error(self, problem: str) -> NoReturn:
        raise RecipeError(
            f"{problem}, in {self._text[:200]!r}",
            key="--where",
            hint='compare fields, such as "step=20 and reward<0.5"; '
            f"there are {', '.join(self._field_names)}",
        )
