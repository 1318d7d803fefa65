"""A file of AReaL's and its overrides, as a tree and as a configuration object."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.errors import Problem, RecipeError

ConfigT = TypeVar("ConfigT")


def read_areal_config_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file with overrides and interpolations carried out.

    Raises:
        RecipeError: It is missing, no YAML, or no mapping; an override has no `=`.
    """
    if not path.is_file():
        raise RecipeError(f"there is no configuration at {path}", key=str(path))
    wrong = [item for item in overrides if "=" not in item]
    if wrong:
        raise RecipeError.from_problems(
            Problem(f"expected key=value, got {item!r}", hint="write actor.path=/models/mine")
            for item in wrong
        )
    try:
        tree = OmegaConf.load(path)
        if not OmegaConf.is_dict(tree):
            raise RecipeError(f"{path} holds no keys and values", key=str(path))
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
        values: Any = OmegaConf.to_container(merged, resolve=True)
    except RecipeError:
        raise
    except Exception as error:  # boundary: PyYAML's errors have no common public base
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    return dict(values)


def to_config(values: Mapping[str, Any], config_class: type[ConfigT], file_name: str) -> ConfigT:
    """A mapping as a configuration class.

    Raises:
        RecipeError: All unknown keys, each with the nearest known one; or a value of a wrong type.
    """
    problems = list(_find_unknown_keys(values, OmegaConf.structured(config_class), ""))
    if problems:
        raise RecipeError.from_problems(problems)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_class), dict(values))
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        said = str(error).splitlines()[0]
        raise RecipeError(said, key=str(error.full_key or file_name)) from error
    return config  # type: ignore[no-any-return]


def _find_unknown_keys(
    values: Mapping[str, Any], config_structure: Any, prefix: str
) -> Iterator[Problem]:
    known = OmegaConf.get_type(config_structure)
    if not dataclasses.is_dataclass(known):
        return  # a plain mapping takes anything
    sections = {field.name: field for field in dataclasses.fields(known)}
    for name, value in values.items():
        if name not in sections:
            near = difflib.get_close_matches(str(name), list(sections), n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sections)}"
            yield Problem(f"unknown key {name!r}", f"{prefix}{name}", hint)
        elif isinstance(value, Mapping):
            yield from _find_unknown_keys(
                value, _find_section(config_structure, name), f"{prefix}{name}."
            )


def _find_section(config_structure: Any, section_name: str) -> Any:
    section = config_structure[section_name]
    if section is not None:
        return section
    node = config_structure._get_node(section_name)  # omegaconf has no public way to ask
    kind = node._metadata.ref_type
    return OmegaConf.structured(kind) if dataclasses.is_dataclass(kind) else {}
