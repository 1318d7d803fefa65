"""Keys in which a run's recipe differs from the defaults, without values that may be secrets."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from areal_hpc.recipe.base import BaseConfig, get_section_class
from areal_hpc.recipe.loading import flatten_keys_hiding_private_values
from areal_hpc.recipe.recipe import Recipe

NO_DEFAULT_TEXT = "(to be given)"
"""In the place of a default: the key must be given, or this version does not know it."""


def find_changed_keys(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, value in flatten_keys_hiding_private_values(recipe).items():
        default = find_default(key)
        if default is PydanticUndefined:
            if value is not None:
                yield key, NO_DEFAULT_TEXT, format_setting(value)
        elif to_jsonable_python(default, fallback=str) != to_jsonable_python(value, fallback=str):
            yield key, format_setting(default), format_setting(value)


def find_default(key: str) -> Any:
    """The default of a dotted key; `PydanticUndefined` for a key without one."""
    holder: type[BaseConfig] | BaseConfig = Recipe
    *sections, last = key.split(".")
    for name in sections:
        found = _get_default(holder, name)
        if isinstance(found, BaseConfig):
            holder = found
            continue
        field = _get_class(holder).model_fields.get(name)
        section = get_section_class(field.annotation) if field else None
        if section is None:
            return PydanticUndefined
        holder = section
    return _get_default(holder, last)


def _get_class(holder: type[BaseConfig] | BaseConfig) -> type[BaseConfig]:
    return holder if isinstance(holder, type) else type(holder)


def _get_default(holder: type[BaseConfig] | BaseConfig, key_name: str) -> Any:
    field = _get_class(holder).model_fields.get(key_name)
    if field is None:
        return PydanticUndefined
    if isinstance(holder, BaseConfig):
        return getattr(holder, key_name)
    return field.get_default(call_default_factory=True, validated_data={})


def format_setting(value: Any) -> str:
    if value is None:
        return "null"
    if value == "":
        return "''"
    return str(value).lower() if isinstance(value, bool) else str(value)
