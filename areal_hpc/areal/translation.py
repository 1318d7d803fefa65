"""Translation of an AReaL configuration into a recipe, with reasons for keys that are lost."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.areal import conversions
from areal_hpc.areal.api.cli_args import (
    AgentRLConfig,
    BaseExperimentConfig,
    NormConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TeacherConfig,
)
from areal_hpc.areal.rules import (
    RULE_BY_KEY,
    ArealConfig,
    Rule,
    UntranslatableError,
    find_rule_key,
    flatten_to_dotted_keys,
    unflatten_dotted_keys,
)
from areal_hpc.errors import RecipeError

IDENTIFYING_SECTIONS = ("actor", "gconfig", "rollout", "train_dataset", "allocation_mode")
"""Sections that identify a configuration of AReaL, which has at least one of them."""
RECIPE_SECTIONS = ("trainer", "inference", "model")
"""Sections that identify a recipe; a configuration of AReaL has none of them."""

OPTIONAL_SECTION_CLASSES = {
    "actor.rejection_sampling": RejectionSamplingConfig,
    "actor.reward_norm": NormConfig,
    "critic": PPOCriticConfig,
    "teacher": TeacherConfig,
}
"""Sections whose keys have defaults that take effect when the section exists."""


@dataclass(frozen=True, slots=True)
class UntranslatedKey:
    """Key without a counterpart in a recipe."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Translation:
    recipe: dict[str, Any]
    """Tree of a recipe, which may lack keys that AReaL sets in the script (`rollout.workflow`)."""
    untranslated: list[UntranslatedKey]
    """Keys without a counterpart, in the order of the configuration."""


def translate_to_recipe(
    config: BaseExperimentConfig | Mapping[str, Any], train_rows: int | None = None
) -> Translation:
    """Translate an object of AReaL's configuration classes, or the tree of a file.

    Args:
        config: Object, or the keys of a file, for which AReaL's defaults fill in the rest.
        train_rows: Rows of the training set; without them epochs cannot be counted in steps.

    Raises:
        RecipeError: The tree is no configuration of AReaL's.
    """
    defaults = flatten_to_dotted_keys(dataclasses.asdict(AgentRLConfig()))
    if isinstance(config, BaseExperimentConfig):
        leaves = flatten_to_dotted_keys(dataclasses.asdict(config))
        stated = {
            key: value
            for key, value in leaves.items()
            if value != defaults.get(_rename_older_key(key))
        }
    else:
        if not any(section in config for section in IDENTIFYING_SECTIONS):
            raise RecipeError(
                "this is not an AReaL configuration: none of "
                f"{', '.join(IDENTIFYING_SECTIONS)} is present",
                hint="give the file that AReaL's --config names",
            )
        if section := next((name for name in RECIPE_SECTIONS if name in config), None):
            raise RecipeError(
                f"this is a recipe, not an AReaL configuration: it has a section {section!r}",
                hint="areal-hpc run takes it as it is",
            )
        stated = {
            key: value for key, value in flatten_to_dotted_keys(config).items() if value != {}
        }
        for section, model in OPTIONAL_SECTION_CLASSES.items():
            if any(key.startswith(f"{section}.") for key in stated):
                defaults |= flatten_to_dotted_keys(dataclasses.asdict(model()), f"{section}.")
        leaves = {
            key: value
            for key, value in defaults.items()
            # A file may give a section as a single value.
            if not any(key == name or key.startswith(f"{name}.") for name in stated)
        }
    stated = {_rename_older_key(key): value for key, value in stated.items()}
    areal = ArealConfig(leaves | stated, frozenset(stated), train_rows)
    return _apply_rules(areal)


def _rename_older_key(key: str) -> str:
    return key.replace("rollout.openai.", "rollout.agent.")


def _apply_rules(areal: ArealConfig) -> Translation:
    recipe: dict[str, Any] = {}
    untranslated: list[UntranslatedKey] = []
    rule_keys = {key: find_rule_key(key) for key in areal.leaves}
    positions = {name: position for position, name in enumerate(RULE_BY_KEY)}
    for key in sorted(areal.leaves, key=lambda key: positions.get(rule_keys[key], -1)):
        rule = RULE_BY_KEY.get(rule_keys[key])
        value, is_stated = areal.get(key), key in areal.stated
        if value is None or (rule and rule.if_stated and not is_stated):
            continue
        try:
            if rule is None:
                raise UntranslatableError(_explain_unknown_key(key))
            new = _apply_rule(rule, key, value, areal)
        except UntranslatableError as error:
            if is_stated:
                untranslated.append(UntranslatedKey(key, value, str(error)))
            continue
        # Arguments of SGLang are concatenated; for other keys the later rule wins.
        extra_args = recipe.get("inference.extra_args", []) + new.pop("inference.extra_args", [])
        recipe |= new | ({"inference.extra_args": extra_args} if extra_args else {})
    if areal.get("rollout.max_concurrent_rollouts") is None:  # AReaL derives it from other keys
        recipe |= conversions.concurrent_episodes("", None, areal)
    order = list(areal.leaves)
    untranslated.sort(key=lambda lost: order.index(lost.key))
    return Translation(unflatten_dotted_keys(recipe), untranslated)


def _apply_rule(rule: Rule, key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if rule.rename:
        if rule.values:
            if value not in list(rule.values):  # a list from YAML cannot be looked up
                raise UntranslatableError(f"one of {', '.join(map(str, rule.values))}")
            value = rule.values[value]
        elif key.endswith(("workflow", "_path")):
            value = conversions.map_areal_module(value)
        return {} if value in (None, "", {}) else {rule.rename: value}
    if rule.convert:
        return dict(getattr(conversions, rule.convert)(key, value, areal))
    if rule.same_as:
        if value not in ("", areal.get(rule.same_as)):
            raise UntranslatableError(rule.note)
    elif rule.refuse:
        if value not in ({}, []):
            raise UntranslatableError(rule.refuse)
    elif not rule.drop and value != rule.always:
        raise UntranslatableError(rule.note)
    return {}


def _explain_unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, [name for name in RULE_BY_KEY if "*" not in name], n=1)
    if near:
        return f"unknown AReaL key; did you mean {near[0]}?"
    return (
        "unknown AReaL key; arguments that a script passes to its workflow belong in "
        "rollout.workflow_kwargs"
    )
