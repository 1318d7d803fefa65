"""Loading of recipes from YAML files, site files and command-line overrides."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.base import explain_validation_errors
from areal_hpc.recipe.cross_checks import find_conflicts
from areal_hpc.recipe.files import EXTENDS_KEY, find_recipe_file, list_recipe_files, read_yaml
from areal_hpc.recipe.presets import PRESET_KEY, drop_values_of_former_preset
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import ClusterConfig
from areal_hpc.recipe.sections.dataset import TaskSetConfig, TrainTaskSetConfig
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.run_inputs import get_recipe_value

_MISSING_VARIABLE_PATTERN = re.compile(r"Environment variable '(\w+)' not found")
EXCLUSIVE_KEYS = {
    "model": ("path", "hub", "tiny"),
    "train_dataset": TrainTaskSetConfig.source_keys,
    "valid_dataset": TaskSetConfig.source_keys,
    "sft.dataset": TaskSetConfig.source_keys,
    "sft.evaluation.dataset": TaskSetConfig.source_keys,
}
"""Sections that name a source by exactly one of several keys."""
DEPENDENT_KEYS_BY_SOURCE = {
    "generator": ("kwargs",),
}
"""Keys that are valid only beside one of those."""

ContainerKindConflict = tuple[str, str, str]
"""Key, its present kind of value, and the new one."""
_CONTAINER_WORDS: Mapping[type, str] = {dict: "keys and values", list: "a list"}


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), site: Path | None = None
) -> Recipe:
    """Load the recipe of a file: overrides win over it, and it wins over the keys of a site file.

    If there is no such file, the path may be the name of a shipped recipe, such as `quickstart`.

    Raises:
        RecipeError: The recipe has problems, all reported at once: unknown keys with the nearest
            known one, wrong types with expected and got, values that do not fit together.
    """
    path = find_recipe_file(Path(path))
    trees = [] if site is None else [OmegaConf.create({"cluster": read_site_file(site)})]
    tree, changes = _read_with_bases(path), parse_overrides(overrides)
    remove_replaced_sources(tree, changes)
    tree = drop_keys_invalidated_by_overrides(tree, changes)
    try:
        merged = _merge_trees(*trees, tree, changes)
        _refuse_missing_values(merged)
        values = OmegaConf.to_container(merged, resolve=True)
    except InterpolationResolutionError as error:
        raise _build_interpolation_error(error, path) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    return build_recipe(values)


def _read_with_bases(path: Path) -> DictConfig:
    first, *others = [read_yaml(file) for file in reversed(list_recipe_files(path))]
    for tree in (first, *others):
        tree.pop(EXTENDS_KEY, None)
    for tree in others:
        remove_replaced_sources(first, tree)
        merged = _merge_trees(drop_keys_invalidated_by_overrides(first, tree), tree)
        assert isinstance(merged, DictConfig)
        first = merged
    return first


def _merge_trees(*trees: DictConfig) -> DictConfig | ListConfig:
    """Merge trees; later ones win.

    Raises:
        RecipeError: A tree has a list where another has keys; all such keys at once.
    """
    plain = [OmegaConf.to_container(tree) for tree in trees]
    conflicts = [
        clash for pair in combinations(plain, 2) for clash in _find_container_kind_conflicts(*pair)
    ]
    if conflicts:
        raise RecipeError.from_problems(
            Problem(f"expected {expected}, got {actual}", key)
            for key, expected, actual in dict.fromkeys(conflicts)
        )
    return OmegaConf.merge(*trees)


def _find_container_kind_conflicts(
    value: object, new_value: object, key: str = ""
) -> Iterator[ContainerKindConflict]:
    kinds = [_CONTAINER_WORDS.get(type(side)) for side in (value, new_value)]
    if isinstance(value, Mapping) and isinstance(new_value, Mapping):
        for name in value.keys() & new_value.keys():
            below = f"{key}.{name}" if key else str(name)
            yield from _find_container_kind_conflicts(value[name], new_value[name], below)
    elif kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        yield key, kinds[0], kinds[1]


def _refuse_missing_values(tree: DictConfig | ListConfig) -> None:
    # OmegaConf's `missing_keys` resolves, but a resolved recipe may have a text with `${...}`.
    if missing := sorted(_find_missing_keys(OmegaConf.to_container(tree))):
        raise RecipeError.from_problems(
            Problem("expected a value, got ???", key, f"write one, or add {key}=... to the command")
            for key in missing
        )


def _find_missing_keys(value: object, key: str = "") -> Iterator[str]:
    if value == "???":
        yield key
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _find_missing_keys(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _find_missing_keys(inner, f"{key}[{number}]")


def _build_interpolation_error(error: InterpolationResolutionError, path: Path) -> RecipeError:
    variable = _MISSING_VARIABLE_PATTERN.search(str(error))
    if variable is None:
        message, hint = str(error).splitlines()[0], "name a key of the recipe: ${section.key}"
    else:
        message = f"the environment variable {variable[1]} is not set"
        hint = f"export {variable[1]}=..., or give a default: ${{oc.env:{variable[1]},value}}"
    return RecipeError(message, key=f"{path}: {error.full_key}", hint=hint)


def build_recipe(values: object) -> Recipe:
    """Build the recipe of a tree of keys; a RecipeError reports all problems at once."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError.from_problems(explain_validation_errors(error.errors(), Recipe)) from None
    if problems := list(find_conflicts(recipe)):
        raise RecipeError.from_problems(problems)
    return recipe


def read_site_file(path: Path) -> DictConfig:
    """Read and check the keys of a site file, which may be some of those of `cluster`.

    A value with `${...}` stays as it is written, because it may name a key that only the recipe
    has. So does `???`, for a value that the recipe or the command line gives.

    Raises:
        RecipeError: The file has problems; all are reported at once.
    """
    if not path.is_file():
        raise RecipeError(f"there is no site file at {path}", hint="ls slurm/sites/")
    tree = read_yaml(path)
    try:
        ClusterConfig.model_validate(_resolve_site(tree, path))
    except ValidationError as error:
        errors_found = [item for item in error.errors() if item["type"] != "missing"]
        if problems := list(explain_validation_errors(errors_found, ClusterConfig, f"{path}: ")):
            raise RecipeError.from_problems(problems) from None
    return tree


def read_site_values(path: Path) -> dict[str, Any]:
    """Read the resolved values of a site file, without those that only a recipe gives."""
    return _resolve_site(read_site_file(path), path)


def _resolve_site(tree: DictConfig, path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = _resolve_known(OmegaConf.create({"cluster": tree}).cluster)
    except InterpolationResolutionError as error:
        raise _build_interpolation_error(error, path) from error
    return values


def _resolve_known(node: Any) -> Any:
    if OmegaConf.is_list(node):
        return [_resolve_known(item) for item in node]
    if not OmegaConf.is_dict(node):
        return node
    resolved = {}
    for key in node:
        with contextlib.suppress(
            InterpolationKeyError, InterpolationToMissingValueError, MissingMandatoryValue
        ):
            resolved[key] = _resolve_known(node[key])
    return resolved


def parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """Parse `key.subkey=value` arguments.

    Raises:
        RecipeError: Arguments have another form or values that are not YAML; all at once.
    """
    if problems := [*_find_malformed_overrides(overrides)]:
        raise RecipeError.from_problems(problems)
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"the overrides cannot be read: {error}") from error


def _find_malformed_overrides(overrides: Sequence[str]) -> Iterator[Problem]:
    rest = iter(overrides)
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals:
            # The user may have written a key and its value as two arguments.
            next_item = next(rest, "")
            joined = f"{key}={next_item}" if next_item and "=" not in next_item else f"{key}=..."
            if "=" in next_item:
                yield from _find_malformed_overrides([next_item])
            yield Problem(f"expected key=value, got {item!r}", hint=f"write {joined}")
            continue
        try:
            yaml.safe_load(value)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or "it cannot be parsed"
            hint = "put it in quotes: braces and brackets open mappings and lists"
            yield Problem(f"the value {value!r} is not YAML: {problem}", key, hint)


def merge_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply overrides to a resolved recipe as `load_recipe` does: values, sources or preset."""
    tree, changes = OmegaConf.create(recipe.model_dump(mode="json")), parse_overrides(overrides)
    remove_replaced_sources(tree, changes)
    tree = drop_keys_invalidated_by_overrides(tree, changes)
    merged = _merge_trees(tree, changes)
    _refuse_missing_values(merged)
    return build_recipe(OmegaConf.to_container(merged))


def drop_keys_invalidated_by_overrides(tree: DictConfig, overrides: DictConfig) -> DictConfig:
    """Remove the values of a resolved recipe's preset if an override has another preset.

    A resolved recipe has every key, so values of the user and of the preset look alike.
    """
    objective = _try_select(tree, "trainer.objective")
    written: Any = OmegaConf.to_container(overrides)
    loss_agg = get_recipe_value(written, "trainer.objective.loss_agg")
    if OmegaConf.is_dict(objective) and loss_agg not in (None, "seq_mean_token_sum_norm"):
        objective.pop("loss_scale_tokens", None)  # it is valid only for seq_mean_token_sum_norm
    preset = get_recipe_value(written, PRESET_KEY)
    section = _try_select(tree, PRESET_KEY.rpartition(".")[0])
    if preset is None or section is None or not set(ObjectiveConfig.model_fields) <= set(section):
        return tree
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return OmegaConf.create(dict(drop_values_of_former_preset(values, str(preset), Recipe)))


def remove_replaced_sources(tree: DictConfig, overrides: DictConfig) -> None:
    """Remove the sources of a model or a data set from a recipe that an override replaces.

    Among keys that exclude one another, one on the command line wins over another in the file.
    That one's dependent keys, such as a generator's arguments, are removed with it.
    """
    written: Any = OmegaConf.to_container(overrides)
    for section, choices in EXCLUSIVE_KEYS.items():
        base = _try_select(tree, section)
        override_keys = [key for key in choices if get_recipe_value(written, f"{section}.{key}")]
        if len(override_keys) != 1 or not OmegaConf.is_dict(base):
            continue
        for key in choices:
            if key != override_keys[0] and base.pop(key, None) is not None:
                for companion in DEPENDENT_KEYS_BY_SOURCE.get(key, ()):
                    base.pop(companion, None)


def _try_select(tree: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException:
        return None
