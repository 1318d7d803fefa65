"""Base class of all configuration models: frozen, no unknown keys, documented fields."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from areal_hpc.errors import Problem


class BaseConfig(BaseModel):
    """One stage's part of a recipe. Unknown keys are errors; values never change after parsing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


def explain_validation_error(
    item: ErrorDetails, root: type[BaseConfig], prefix: str = ""
) -> Problem:
    """A pydantic finding in the words of the person who wrote the file.

    `prefix` is put before the key, for files that hold a part of a recipe.
    """
    key = prefix + ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        *location, name = item["loc"]
        hint = _suggest_key(str(name), root, tuple(location))
        return Problem(f"unknown key {name!r}", key, hint)
    if item["type"] == "missing":
        return Problem("this key is required", key, f"add {key}=... to the recipe")
    message = re.sub(r"^\w+ should ", "it must ", item["msg"].removeprefix("Value error, "))
    if item["type"] == "string_pattern_mismatch":
        message = f"it must match the regular expression {item['ctx']['pattern']}"
    searched = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    hint = f"areal-hpc recipe-keys | grep -F {searched}" if searched else ""
    return Problem(f"{message}, got {item['input']!r:.300}", key, hint)


def _suggest_key(name: str, root: type[BaseConfig], location: tuple[int | str, ...]) -> str:
    """What may have been meant by an unknown key: a similar one there, or one of its name."""
    section = _find_section(root, location)
    known = sorted(section.model_fields) if section else []
    prefix = "".join(f"{part}." for part in location)
    inner = _find_keys_named(section, name, prefix) if section else iter(())
    meant = [*difflib.get_close_matches(name, known, n=1), *inner, *_find_keys_named(root, name)]
    return f"did you mean {meant[0]}?" if meant else f"choose from {', '.join(known)}"


def _find_keys_named(section: type[BaseConfig], name: str, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a name anywhere in a section, the outermost first."""
    if name in section.model_fields:
        yield f"{prefix}{name}"
    for key, field in section.model_fields.items():
        if inner := get_section_class(field.annotation):
            yield from _find_keys_named(inner, name, f"{prefix}{key}{get_key_separator(field)}")


def _find_section(
    root: type[BaseConfig], location: tuple[int | str, ...]
) -> type[BaseConfig] | None:
    """The configuration class at a place of the tree."""
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
    """What stands between the key of a section and those in it: sections by name have one more."""
    return ".<name>." if _is_mapping(field.annotation) else "."


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def get_section_class(annotation: Any) -> type[BaseConfig] | None:
    """The configuration class behind a field, optional or not."""
    for choice in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(choice, type) and issubclass(choice, BaseConfig):
            return choice
    return None
