"""Recipes from YAML files, site files and overrides."""

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
}
"""Sections of a recipe that say where something comes from, by keys of which one is given."""
DEPENDENT_KEYS_BY_SOURCE = {
    "generator": ("kwargs",),
}
"""Keys beside one of those that mean nothing without it."""

ContainerKindConflict = tuple[str, str, str]
"""A key, what it has and what it would get instead."""
_CONTAINER_WORDS: Mapping[type, str] = {dict: "keys and values", list: "a list"}


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), site: Path | None = None
) -> Recipe:
    """The recipe of a file: overrides win over it, and it wins over the keys of a site file.

    Where there is no such file, the path may be the name of a shipped recipe, as `quickstart` is.

    Raises:
        RecipeError: Every problem of the recipe at once: unknown keys with the nearest known
            one, wrong types with expected and got, values that do not fit together.
    """
    path = find_recipe_file(Path(path))
    trees = [] if site is None else [OmegaConf.create({"cluster": read_site_file(site)})]
    tree, given = _read_with_bases(path), parse_overrides(overrides)
    remove_replaced_sources(tree, given)
    tree = drop_keys_invalidated_by_overrides(tree, given)
    try:
        merged = _merge_trees(*trees, tree, given)
        _raise_if_values_are_missing(merged)
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
    """Trees in one, in which later ones win.

    Raises:
        RecipeError: One has a list where another has keys; all such places at once.
    """
    plain = [OmegaConf.to_container(tree) for tree in trees]
    unlike = [
        one for pair in combinations(plain, 2) for one in _find_container_kind_conflicts(*pair)
    ]
    if unlike:
        raise RecipeError.from_problems(
            Problem(f"expected {wanted}, got {found}", key)
            for key, wanted, found in dict.fromkeys(unlike)
        )
    return OmegaConf.merge(*trees)


def _find_container_kind_conflicts(
    value: object, new_value: object, key: str = ""
) -> Iterator[ContainerKindConflict]:
    kinds = [_CONTAINER_WORDS.get(type(one)) for one in (value, new_value)]
    if isinstance(value, Mapping) and isinstance(new_value, Mapping):
        for name in value.keys() & new_value.keys():
            below = f"{key}.{name}" if key else str(name)
            yield from _find_container_kind_conflicts(value[name], new_value[name], below)
    elif kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        yield key, kinds[0], kinds[1]


def _raise_if_values_are_missing(tree: DictConfig | ListConfig) -> None:
    # OmegaConf's own `missing_keys` resolves: a resolved recipe may have a text with `${...}`.
    if missing := sorted(_find_missing_keys(OmegaConf.to_container(tree))):
        raise RecipeError.from_problems(
            Problem("expected a value, got ???", key, f"write one, or add {key}=... to the command")
            for key in missing
        )


def _find_missing_keys(value: object, key: str = "") -> Iterator[str]:
    if value == "???":
        yield key
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _find_missing_keys(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _find_missing_keys(one, f"{key}[{number}]")


def _build_interpolation_error(error: InterpolationResolutionError, path: Path) -> RecipeError:
    variable = _MISSING_VARIABLE_PATTERN.search(str(error))
    if variable is None:
        message, hint = str(error).splitlines()[0], "name a key of the recipe: ${section.key}"
    else:
        message = f"the environment variable {variable[1]} is not set"
        hint = f"export {variable[1]}=..., or give a default: ${{oc.env:{variable[1]},value}}"
    return RecipeError(message, key=f"{path}: {error.full_key}", hint=hint)


def build_recipe(values: object) -> Recipe:
    """The recipe of a tree of keys; a RecipeError tells every problem at once."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError.from_problems(explain_validation_errors(error.errors(), Recipe)) from None
    if problems := list(find_conflicts(recipe)):
        raise RecipeError.from_problems(problems)
    return recipe


def read_site_file(path: Path) -> DictConfig:
    """The keys of a site file, each checked, though it need not hold all that a cluster has.

    A value with `${...}` stays as it is written: it may name a key that only the recipe has. So
    does `???`, for a value that the recipe or the command line gives.

    Raises:
        RecipeError: Every problem of the file at once.
    """
    if not path.is_file():
        raise RecipeError(f"there is no site file at {path}", hint="ls slurm/sites/")
    tree = read_yaml(path)
    try:
        ClusterConfig.model_validate(_resolve_site(tree, path))
    except ValidationError as error:
        found = [item for item in error.errors() if item["type"] != "missing"]
        if problems := list(explain_validation_errors(found, ClusterConfig, f"{path}: ")):
            raise RecipeError.from_problems(problems) from None
    return tree


def read_site_values(path: Path) -> dict[str, Any]:
    """The keys of a site file with their values, without those that only a recipe gives."""
    return _resolve_site(read_site_file(path), path)


def _resolve_site(tree: DictConfig, path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = _resolve_known(OmegaConf.create({"cluster": tree}).cluster)
    except InterpolationResolutionError as error:
        raise _build_interpolation_error(error, path) from error
    return values


def _resolve_known(node: Any) -> Any:
    if OmegaConf.is_list(node):
        return [_resolve_known(one) for one in node]
    if not OmegaConf.is_dict(node):
        return node
    found = {}
    for key in node:
        with contextlib.suppress(
            InterpolationKeyError, InterpolationToMissingValueError, MissingMandatoryValue
        ):
            found[key] = _resolve_known(node[key])
    return found


def parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """The keys of `key.subkey=value` arguments.

    Raises:
        RecipeError: Some are not of that form; all of these at once. Or a value is not YAML.
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
            # A key and its value may have been written apart.
            after = next(rest, "")
            apart = f"{key}={after}" if after and "=" not in after else f"{key}=..."
            if "=" in after:
                yield from _find_malformed_overrides([after])
            yield Problem(f"expected key=value, got {item!r}", hint=f"write {apart}")
            continue
        try:
            yaml.safe_load(value)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or "it cannot be parsed"
            hint = "put it in quotes: braces and brackets open mappings and lists"
            yield Problem(f"the value {value!r} is not YAML: {problem}", key, hint)


def merge_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A resolved recipe with other values, sources or preset, as `load_recipe` does it."""
    tree, given = OmegaConf.create(recipe.model_dump(mode="json")), parse_overrides(overrides)
    remove_replaced_sources(tree, given)
    tree = drop_keys_invalidated_by_overrides(tree, given)
    merged = _merge_trees(tree, given)
    _raise_if_values_are_missing(merged)
    return build_recipe(OmegaConf.to_container(merged))


def drop_keys_invalidated_by_overrides(tree: DictConfig, overrides: DictConfig) -> DictConfig:
    """A recipe without what its preset set, if it is a resolved one and an override has another.

    A resolved recipe names every key: what was written by hand cannot be told from the rest.
    """
    objective = _select_unless_wrong(tree, "trainer.objective")
    written: Any = OmegaConf.to_container(overrides)
    loss_agg = get_recipe_value(written, "trainer.objective.loss_agg")
    if OmegaConf.is_dict(objective) and loss_agg not in (None, "seq_mean_token_sum_norm"):
        objective.pop("loss_scale_tokens", None)  # it belongs to that alone
    preset = get_recipe_value(written, PRESET_KEY)
    said = _select_unless_wrong(tree, PRESET_KEY.rpartition(".")[0])
    if preset is None or said is None or not set(ObjectiveConfig.model_fields) <= set(said):
        return tree
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return OmegaConf.create(dict(drop_values_of_former_preset(values, str(preset), Recipe)))


def remove_replaced_sources(tree: DictConfig, overrides: DictConfig) -> None:
    """Take those sources of a model or of a data set out of a recipe that an override replaces.

    Of the keys that exclude one another, one given on the command line wins over another kind in
    the file, and what belongs to that one goes with it, such as a generator's arguments.
    """
    written: Any = OmegaConf.to_container(overrides)
    for section, choices in EXCLUSIVE_KEYS.items():
        base = _select_unless_wrong(tree, section)
        given = [key for key in choices if get_recipe_value(written, f"{section}.{key}")]
        if len(given) != 1 or not OmegaConf.is_dict(base):
            continue
        for key in choices:
            if key != given[0] and base.pop(key, None) is not None:
                for companion in DEPENDENT_KEYS_BY_SOURCE.get(key, ()):
                    base.pop(companion, None)


def _select_unless_wrong(tree: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException:
        return None
