"""Objective of each source of training tasks: the recipe's, with the keys that the source names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.base import explain_validation_errors
from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.objective import ObjectiveConfig

SOURCE_OBJECTIVE_KEYS = (
    *("preset", "credit", "turn_discount", "baseline", "scale_rewards", "std_ddof"),
    *("min_reward_std", "surrogate", "ratio_level", "clip_low", "clip_high", "clip_dual"),
    *("loss_agg", "loss_scale_tokens", "entropy_coef", "observation_coef", "brevity_bonus"),
)
"""Keys that may differ between sources. Others name a network, or a pass over the whole batch."""


def resolve_source_objectives(recipe: Recipe) -> list[ObjectiveConfig]:
    """Resolve the objective of each source; without sources, that of the recipe alone.

    With a `preset` a source starts from the defaults of `SOURCE_OBJECTIVE_KEYS`, else from the
    recipe's objective.

    Raises:
        RecipeError: Keys are unknown, the same for all sources, or do not fit together.
    """
    base, objectives, problems = recipe.trainer.objective, list[ObjectiveConfig](), list[Problem]()
    for number, source in enumerate(recipe.train_mixture):
        key, own = f"train_dataset.sources.{number}.objective", source.objective
        objectives.append(base)
        if shared := list(_find_shared_keys(base, own, key)):
            problems += shared
            continue
        try:
            max_new_tokens = recipe.rollout.sampling.max_new_tokens
            values = _merge_keys(base, own, max_new_tokens)
            objectives[-1] = ObjectiveConfig.model_validate(values)
        except ValidationError as error:
            problems += explain_validation_errors(error.errors(), ObjectiveConfig, f"{key}.")
    if problems:
        raise RecipeError.from_problems(problems)
    return objectives or [base]


def list_trained_settings(
    recipe: Recipe, objectives: Sequence[ObjectiveConfig], known: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """List the `known` settings that sources are trained with, by the keys that set them.

    A source's own keys and preset are its own settings; the others are those of the recipe.
    """
    settings = {}
    for number, objective in enumerate(objectives):
        own = recipe.train_mixture[number].objective if recipe.train_mixture else {}
        for name, value in known:
            if getattr(objective, name) == value:
                is_own = name in own or "preset" in own
                section = f"train_dataset.sources.{number}" if is_own else "trainer"
                settings[f"{section}.objective.{name}"] = value
    return settings


def _find_shared_keys(base: ObjectiveConfig, own: Mapping[str, Any], key: str) -> Iterator[Problem]:
    preset = PRESETS.get(str(own.get("preset")), PRESETS["default"])
    shared = ObjectiveConfig.model_fields.keys() - {*SOURCE_OBJECTIVE_KEYS, "kl"}
    preset_keys = preset.objective.keys() & {*shared, "kl"}
    for name in sorted((own.keys() & shared) | preset_keys):
        origin = f", and preset={own['preset']} sets it" if name in preset_keys else ""
        yield Problem(
            f"{name} is the same for all sources{origin}",
            f"{key}.{'preset' if origin else name}",
            f"set trainer.objective.{name}; a source may set {', '.join(SOURCE_OBJECTIVE_KEYS)} "
            "and kl.coef",
        )
    kl = own.get("kl")
    if kl is not None and (not isinstance(kl, Mapping) or {*kl} != {"coef"} or not base.kl.coef):
        yield Problem(
            f"a source changes the coefficient of trainer.objective.kl alone, got kl={kl} beside "
            f"trainer.objective.kl.coef={base.kl.coef}",
            f"{key}.kl",
            "set trainer.objective.kl with a coef above 0, and here kl.coef",
        )
    if own and "value" in (base.baseline, own.get("baseline")):
        yield Problem(
            "a critic learns the values of all sources by one objective",
            f"{key}.baseline",
            "remove the objectives of sources, or use another baseline than value",
        )


def _merge_keys(
    base: ObjectiveConfig, own: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    values = base.model_dump()
    if preset := PRESETS.get(str(own.get("preset"))):
        defaults = ObjectiveConfig().model_dump()
        values |= {key: defaults[key] for key in SOURCE_OBJECTIVE_KEYS} | dict(preset.objective)
    merged = values | dict(own) | {"kl": values["kl"] | (own.get("kl") or {})}
    if own.get("loss_scale_tokens") is None:  # it belongs to one loss_agg
        has_scale = merged["loss_agg"] == "seq_mean_token_sum_norm"
        default = values["loss_scale_tokens"] or max_new_tokens
        merged["loss_scale_tokens"] = default if has_scale else None
    return merged
