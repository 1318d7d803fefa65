"""Reference table of recipe keys, generated from the docstrings of the sections' fields."""

import ast
import inspect
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from areal_hpc.recipe.base import BaseConfig, get_key_separator, get_section_class
from areal_hpc.recipe.recipe import Recipe

TYPE_NAMES = {Any: "anything", Path: "path"}
COMPARISON_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""Signs of bounds, by their names in pydantic."""


def render_key_table() -> str:
    """Render all keys of a recipe with type, default and meaning as a Markdown table."""
    lines = [
        "# Recipe keys",
        "",
        "Made by `areal-hpc recipe-keys`. Override any on the command line with `key=value`.",
        "",
        "A file may begin with `extends: OTHER`, a path relative to it or the name of a shipped",
        "recipe (`areal-hpc recipes`): its own keys are then merged over those of OTHER. A list is",
        "replaced as a whole, and null takes an optional section out.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *_iterate_key_rows(Recipe, "", {})]) + "\n"


def list_keys() -> list[str]:
    """List the keys of a recipe that hold a value, in the order of the reference."""
    return list(_iterate_keys(Recipe, ""))


def _iterate_keys(model: type[BaseConfig], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = get_section_class(field.annotation)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from _iterate_keys(section, f"{prefix}{name}{get_key_separator(field)}")


def _iterate_key_rows(
    model: type[BaseConfig], prefix: str, shown: dict[tuple[type, str], str]
) -> Iterator[str]:
    """Yield a section's rows; one row stands for all keys that are `shown` in another section."""
    meanings = read_meanings(model)
    repeated: dict[str, list[str]] = defaultdict(list)
    for name, field in model.model_fields.items():
        declaring = next(kind for kind in model.__mro__ if name in inspect.get_annotations(kind))
        place = shown.setdefault((declaring, name), prefix)
        section, key = get_section_class(field.annotation), f"{prefix}{name}"
        if place != prefix:
            repeated[place].append(name)
        elif section is not None:
            yield f"| **`{key}`** | | | {meanings[name]} |"
            yield from _iterate_key_rows(section, f"{key}{get_key_separator(field)}", shown)
        else:
            kind = describe_type(field.annotation, field.metadata).replace("|", "\\|")
            yield f"| `{key}` | {kind} | {_format_default(field)} | {meanings[name]} |"
    for place, names in repeated.items():
        yield f"| `{prefix}<option>` | | | As in `{place[:-1]}`: {', '.join(names)}. |"


def read_meanings(model: type) -> dict[str, str]:
    """Read the docstring of each field from the source of a class of ours, as a cell of a table.

    pydantic would read the sources at each import, which takes a fifth of a recipe's loading.
    """
    meanings: dict[str, str] = {}
    for section in reversed(model.__mro__):
        if not section.__module__.startswith("areal_hpc."):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
        assert isinstance(definition, ast.ClassDef)
        for key, text in pairwise(definition.body):
            match key, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    meanings[name] = " ".join(meaning.split()).replace("|", "\\|")
    return meanings


def describe_type(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    """Describe the values of a type, such as `int >= 1 or null`.

    `bounds` are constraints that pydantic has moved to `FieldInfo.metadata`.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = (item.metadata if isinstance(item, FieldInfo) else [item] for item in parts[1:])
        return describe_type(parts[0], [*bounds, *chain.from_iterable(inner)])
    if origin in (Union, UnionType):
        kinds = [describe_type(part, bounds) for part in parts if part is not NoneType]
        return " or ".join([*kinds, "null"] if NoneType in parts else kinds)
    if origin is Literal:
        kind = ", ".join(map(str, parts))
    elif origin is dict:
        kind = "mapping" if parts[1] is Any else f"mapping to {describe_type(parts[1])}"
    elif origin is tuple and parts[-1] is Ellipsis:
        kind = f"list of {describe_type(parts[0])}"
    elif origin is tuple:
        kind = f"[{', '.join(map(describe_type, parts))}]"
    else:
        kind = TYPE_NAMES.get(annotation) or annotation.__name__
    limits = " and ".join(_format_bounds(bounds))
    return f"{kind} {limits}" if limits else kind


def _format_bounds(bounds: Iterable[Any]) -> Iterator[str]:
    for bound in bounds:
        for name, sign in COMPARISON_SIGNS.items():
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name)}"
        if getattr(bound, "pattern", None):
            yield f"like `{bound.pattern}`"


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"
