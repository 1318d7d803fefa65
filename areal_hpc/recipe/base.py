"""Base class of all configuration models: frozen, no unknown keys, documented fields."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict
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
        known = _list_known_keys(root, item["loc"][:-1])
        name = str(item["loc"][-1])
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        return Problem(f"unknown key {name!r}", key, hint)
    if item["type"] == "missing":
        return Problem("this key is required", key, f"add {key}=... to the recipe")
    message = item["msg"].removeprefix("Value error, ")
    searched = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    hint = f"areal-hpc recipe-keys | grep -F {searched}" if searched else ""
    return Problem(f"{message}, got {item['input']!r:.300}", key, hint)


def _list_known_keys(root: type[BaseConfig], location: tuple[int | str, ...]) -> list[str]:
    """The fields of the configuration class at a place of the tree."""
    model = root
    for part in location:
        if isinstance(part, int):  # an item of a list
            continue
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        section = get_section_class(field.annotation)
        if section is None:
            return []
        model = section
    return sorted(model.model_fields)


def get_section_class(annotation: Any) -> type[BaseConfig] | None:
    """The configuration class behind a field, optional or not."""
    for choice in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(choice, type) and issubclass(choice, BaseConfig):
            return choice
    return None
