"""Filters of rows as conditions of SQLite, with the meaning that they have for text commands."""

from areal_hpc.errors import RecipeError
from areal_hpc.view.transcripts.filter_expression import (
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Negation,
)
from areal_hpc.view.transcripts.row_search import METRIC_PREFIX, PART_PREFIX

SqlValue = float | str
TEXT_FIELD = "text"
"""Its values are long: they have a table of their own, with their case folded."""
_SQL_OPERATOR_BY_SIGN = {"=": "=", "!=": "IS NOT", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


def compile_filter(expression: Expression) -> tuple[str, list[SqlValue]]:
    """A condition that is 0 or 1 for every row, and the values that stand for its `?`."""
    match expression:
        case Comparison():
            return _compile_comparison(expression)
        case Negation(term):
            condition, values = compile_filter(term)
            return f"NOT ({condition})", values
        case Conjunction(terms):
            return _join_conditions(" AND ", terms)
        case Disjunction(terms):
            return _join_conditions(" OR ", terms)


def get_column_sql(field: str) -> tuple[str, list[str]]:
    """The value of a known field as SQL, and the values that stand for its `?`.

    Raises:
        RecipeError: It is that of a part or a metric that no reward can have.
    """
    if field.startswith((PART_PREFIX, METRIC_PREFIX)):
        if '"' in field:
            raise RecipeError("names of parts and metrics have no quotes", key=field[:100])
        return "json_extract(named, ?)", [f'$."{field}"']
    if field == TEXT_FIELD:
        return "(SELECT text FROM texts WHERE texts.id = rows.id)", []
    return f'"{field}"', []


def _join_conditions(word: str, terms: tuple[Expression, ...]) -> tuple[str, list[SqlValue]]:
    compiled = [compile_filter(term) for term in terms]
    condition = word.join(f"({condition})" for condition, _ in compiled)
    return condition, [value for _, values in compiled for value in values]


def _compile_comparison(comparison: Comparison) -> tuple[str, list[SqlValue]]:
    column, named = get_column_sql(comparison.field)
    wanted: SqlValue = comparison.wanted
    if comparison.sign == "~" or comparison.field == TEXT_FIELD:
        wanted = str(wanted).casefold()
    if comparison.sign == "~":
        text = column if comparison.field == TEXT_FIELD else f"casefold({column})"
        condition = f"instr({text}, ?) > 0"
    else:
        condition = f"{column} {_SQL_OPERATOR_BY_SIGN[comparison.sign]} ?"
    # A field that a row lacks compares as unequal to everything.
    return f"COALESCE({condition}, 0)", [*named, wanted]
