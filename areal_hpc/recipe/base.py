"""Base class of all configuration models, and problems from pydantic's validation errors."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from areal_hpc.errors import Problem
from areal_hpc.recipe.keys import hide_private_values_equal_in, rank_section

Location = tuple[int | str, ...]
"""Location of a value in a tree: keys, and indices in lists."""


REWARD_NAMES = ("reward", "reward_fn", "reward_func", "reward_funcs", "reward_function")
"""Keys for a reward in other trainers."""
REWARD_HINT = (
    "a recipe names no reward: it is what the agent's `run` returns, and an agent that calls a "
    "reward function takes its name from rollout.workflow_kwargs"
)


class BaseConfig(BaseModel):
    """Section of a recipe. Unknown keys are errors; values never change after parsing.

    Floats are finite.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )
    key_hints: ClassVar[Mapping[str, str]] = {}
    """Hints for unknown keys that users often write in this section."""


def explain_validation_errors(
    errors: Iterable[ErrorDetails], root: type[BaseConfig], prefix: str = ""
) -> Iterator[Problem]:
    """Explain pydantic's errors in terms of the file, as one problem for each key.

    For a value that fits none of several types pydantic reports an error for each of them. `prefix`
    is put before the key, for files that hold a part of a recipe.
    """
    items_by_key: dict[Location, list[ErrorDetails]] = {}
    for item in errors:
        items_by_key.setdefault(_cut_to_key(item["loc"], root), []).append(item)
    for location, items in items_by_key.items():
        yield _explain_errors_of_key(items, location, root, prefix)


def _explain_errors_of_key(
    items: Sequence[ErrorDetails], location: Location, root: type[BaseConfig], prefix: str
) -> Problem:
    key = prefix + ".".join(str(part) for part in location)
    first = items[0]
    if first["type"] == "extra_forbidden":
        *section, name = location
        return Problem(f"unknown key {name!r}", key, _suggest_key(str(name), root, tuple(section)))
    if first["type"] == "missing":
        return Problem("this key is required", key, _suggest_missing(root, location))
    # Among several types the user means the one with the innermost error.
    depth = max(len(item["loc"]) for item in items)
    innermost = [item for item in items if len(item["loc"]) == depth]
    message = ", or ".join(dict.fromkeys(map(_describe_error, innermost)))
    searched_key = ".".join(str(part) for part in location if not isinstance(part, int))
    hint = f"areal-hpc recipe-keys | grep -F {searched_key}" if searched_key else ""
    value = innermost[0]["input"]
    shown = hide_private_values_equal_in(value, value, ".".join(map(str, location)))
    return Problem(f"{message}, got {shown!r:.300}", key, hint)


def _describe_error(item: ErrorDetails) -> str:
    if item["type"] == "string_pattern_mismatch":
        return f"it must match the regular expression {item['ctx']['pattern']}"
    message = item["msg"].removeprefix("Value error, ").partition(", unable to parse ")[0]
    return re.sub(r"^\w+ should ", "it must ", message)


def _cut_to_key(location: Location, root: type[BaseConfig]) -> Location:
    annotation: Any = root
    key: list[int | str] = []
    for part in location:
        annotation = _strip_none(annotation)
        if get_origin(annotation) in (Union, UnionType):
            named = [kind for kind in get_args(annotation) if getattr(kind, "__name__", "") == part]
            if not named or get_section_class(named[0]) is None:
                break
            annotation = named[0]  # a section that is one of several types
            continue
        key.append(part)
        annotation = _get_type_within(annotation, part)
    return tuple(key)


def _strip_none(annotation: Any) -> Any:
    while True:
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        is_optional = get_origin(annotation) in (Union, UnionType) and len(kinds) == 1
        if not is_optional and get_origin(annotation) is not Annotated:
            return annotation
        annotation = kinds[0]


def _get_type_within(annotation: Any, key_or_index: int | str) -> Any:
    kinds = get_args(annotation)
    if section := get_section_class(annotation) if not kinds else None:
        field = section.model_fields.get(str(key_or_index))
        return field.annotation if field else Any
    if get_origin(annotation) is dict:
        return kinds[1]
    if isinstance(key_or_index, int) and kinds:
        return (
            kinds[key_or_index]
            if key_or_index < len(kinds) and kinds[-1] is not Ellipsis
            else kinds[0]
        )
    return Any


def _suggest_missing(root: type[BaseConfig], location: Location) -> str:
    key = ".".join(map(str, location))
    section = _find_section(root, tuple(location))
    if section is None:
        return f"add {key}=... to the recipe"
    required = [name for name, field in section.model_fields.items() if field.is_required()]
    keys = ", ".join(f"{name}: ..." for name in required) or "..."
    return f"add {key}: {{{keys}}} to the recipe"


def _suggest_key(unknown_key: str, root: type[BaseConfig], location: tuple[int | str, ...]) -> str:
    section = _find_section(root, location)
    known = sorted(section.model_fields) if section else []
    prefix = "".join(f"{part}." for part in location)
    if section and unknown_key in section.key_hints:
        return section.key_hints[unknown_key]
    if unknown_key in REWARD_NAMES:
        return REWARD_HINT
    inner = [*_find_keys_named(section, unknown_key, prefix)] if section and location else []
    near = difflib.get_close_matches(unknown_key, known, n=1)
    if near and not inner:
        return f"did you mean {near[0]}?"
    if elsewhere := inner or sorted(_find_keys_named(root, unknown_key), key=rank_section):
        others = f" (or {', '.join(elsewhere[1:])})" if elsewhere[1:] else ""
        return f"did you mean {elsewhere[0]}?{others}"
    return REWARD_HINT if location == ("reward",) else f"choose from {', '.join(known)}"


def _find_keys_named(section: type[BaseConfig], key_name: str, prefix: str = "") -> Iterator[str]:
    if key_name in section.model_fields:
        yield f"{prefix}{key_name}"
    for key, field in section.model_fields.items():
        if inner := get_section_class(field.annotation):
            yield from _find_keys_named(inner, key_name, f"{prefix}{key}{get_key_separator(field)}")


def _find_section(
    root: type[BaseConfig], location: tuple[int | str, ...]
) -> type[BaseConfig] | None:
    model, is_name = root, False
    for part in location:
        if isinstance(part, int) or is_name:  # an item of a list, or of a mapping
            is_name = False
            continue
        field = model.model_fields.get(str(part))
        section = field and get_section_class(field.annotation)
        if not section:
            return None
        model, is_name = section, bool(field and _is_mapping(field.annotation))
    return model


def get_key_separator(field: FieldInfo) -> str:
    """Return the separator between a section's key and its own keys; mappings add a name."""
    return ".<name>." if _is_mapping(field.annotation) else "."


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def get_section_class(annotation: Any) -> type[BaseConfig] | None:
    """Return the configuration class in a field's annotation, optional or not; None without."""
    for choice in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(choice, type) and issubclass(choice, BaseConfig):
            return choice
    return None
