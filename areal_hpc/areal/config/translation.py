"""Translation of an AReaL configuration into a recipe, with reasons for what is lost."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.areal.api.cli_args import (
    AgentRLConfig,
    BaseExperimentConfig,
    NormConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TeacherConfig,
)
from areal_hpc.areal.config.actor_rules import ACTOR_RULES
from areal_hpc.areal.config.rollout_rules import ROLLOUT_RULES, SGLANG_KEY_PATTERN
from areal_hpc.areal.config.rules import (
    ArealConfigValues,
    KeyRule,
    Untranslatable,
    flatten_to_dotted_keys,
    unflatten_dotted_keys,
)
from areal_hpc.areal.config.run_rules import RUN_RULES
from areal_hpc.errors import RecipeError

RULE_BY_KEY: dict[str, KeyRule] = {
    rule.key: rule for rule in (*RUN_RULES, *ROLLOUT_RULES, *ACTOR_RULES)
}
"""By AReaL's key. Where two make the same key of a recipe, the later one wins."""

KEYS_THAT_IDENTIFY_AREAL_CONFIG = (
    "actor",
    "gconfig",
    "rollout",
    "train_dataset",
    "allocation_mode",
)
"""A configuration of AReaL's has at least one of these."""

OPTIONAL_SECTION_CLASSES = {
    "actor.rejection_sampling": RejectionSamplingConfig,
    "actor.reward_norm": NormConfig,
    "critic": PPOCriticConfig,
    "teacher": TeacherConfig,
}
"""Sections whose keys have defaults that mean something once they are there."""
EXTRA_ARGS_KEY = "inference.extra_args"


@dataclass(frozen=True, slots=True)
class UntranslatedKey:
    """A key that no key of a recipe stands for."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Translation:
    """Result of translating a configuration."""

    recipe: dict[str, Any]
    """The tree of a recipe. What AReaL says in the script (`rollout.workflow`) may be missing."""
    untranslated: list[UntranslatedKey]
    """In the order of the configuration."""


def translate_to_recipe(
    config: BaseExperimentConfig | Mapping[str, Any], train_rows: int | None = None
) -> Translation:
    """Translate an object of AReaL's configuration, or the tree of a file.

    Args:
        config: Of a file, what it states; AReaL's defaults stand for the rest.
        train_rows: Rows of the training set; without them epochs cannot be counted in steps.

    Raises:
        RecipeError: The tree is no configuration of AReaL's.
    """
    defaults = flatten_to_dotted_keys(dataclasses.asdict(AgentRLConfig()))
    if isinstance(config, BaseExperimentConfig):
        leaves = flatten_to_dotted_keys(dataclasses.asdict(config))
        given = {
            key for key, value in leaves.items() if value != defaults.get(_resolve_renamed_key(key))
        }
    else:
        if not any(section in config for section in KEYS_THAT_IDENTIFY_AREAL_CONFIG):
            raise RecipeError(
                "this is not an AReaL configuration: none of "
                f"{', '.join(KEYS_THAT_IDENTIFY_AREAL_CONFIG)} is present",
                hint="give the file that AReaL's --config names",
            )
        stated = {
            key: value for key, value in flatten_to_dotted_keys(config).items() if value != {}
        }
        for section, model in OPTIONAL_SECTION_CLASSES.items():
            if any(key.startswith(f"{section}.") for key in stated):
                defaults |= flatten_to_dotted_keys(dataclasses.asdict(model()), f"{section}.")
        absent = {
            key: value
            for key, value in defaults.items()
            if not _is_key_or_section_stated(key, stated)
        }
        leaves, given = absent | stated, set(stated)
    return _apply_rules(ArealConfigValues(leaves, frozenset(given), train_rows))


def _resolve_renamed_key(key: str) -> str:
    return key.replace("rollout.openai.", "rollout.agent.")


def _is_key_or_section_stated(key: str, stated_values: Mapping[str, Any]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in stated_values for end in range(1, len(parts) + 1))


def _apply_rules(areal_values: ArealConfigValues) -> Translation:
    recipe: dict[str, Any] = {}
    untranslated: list[UntranslatedKey] = []
    arguments: list[str] = []
    places = {name: place for place, name in enumerate(RULE_BY_KEY)}
    found = [(key, find_rule(key)) for key in areal_values.leaves]
    for key, rule in sorted(found, key=lambda one: places[one[1].key] if one[1] else -1):
        value, is_given = areal_values(key), key in areal_values.given
        if rule is None:
            if is_given and value is not None:
                untranslated.append(UntranslatedKey(key, value, _explain_unknown_key(key)))
        elif rule.key == SGLANG_KEY_PATTERN:
            arguments += _to_sglang_arguments(key.removeprefix("sglang."), value)
        elif is_given or not rule.only_if_given:
            become = rule.translate(value, areal_values) if value is not None else {}
            if not isinstance(become, Untranslatable):
                recipe |= become
            elif is_given:
                untranslated.append(UntranslatedKey(key, value, become.reason))
    if arguments:
        recipe[EXTRA_ARGS_KEY] = arguments
    if areal_values("rollout.max_concurrent_rollouts") is None:  # it follows from other keys
        become = RULE_BY_KEY["rollout.max_concurrent_rollouts"].translate(None, areal_values)
        assert not isinstance(become, Untranslatable)
        recipe |= become
    untranslated.sort(key=lambda one: list(areal_values.leaves).index(one.key))
    return Translation(unflatten_dotted_keys(recipe), untranslated)


def find_rule(key: str) -> KeyRule | None:
    """The rule for a key: its own, or that of a section it is in."""
    if key in RULE_BY_KEY:
        return RULE_BY_KEY[key]
    parts = key.split(".")
    sections = (".".join(parts[:end]) + ".*" for end in range(len(parts), 0, -1))
    return next((RULE_BY_KEY[section] for section in sections if section in RULE_BY_KEY), None)


def _to_sglang_arguments(field_name: str, value: Any) -> Iterator[str]:
    if value is None or value is False or value == {} or value == []:
        return
    yield f"--{field_name.replace('_', '-')}"
    if isinstance(value, list):
        yield from map(str, value)
    elif value is not True:
        yield str(value)


def _explain_unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, [name for name in RULE_BY_KEY if "*" not in name], n=1)
    if near:
        return f"unknown AReaL key; did you mean {near[0]}?"
    return (
        "not a key of AReaL's that is known here; what a script hands to its workflow goes into "
        "rollout.workflow_kwargs"
    )
