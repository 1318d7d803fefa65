"""Presets of the objective: names of algorithms, which stand for values of keys.

A key in the recipe wins over its preset. A resolved recipe has every key: there another preset
replaces the values of the former one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.recipe.base import BaseConfig, get_section_class
from areal_hpc.recipe.keys import flatten_keys
from areal_hpc.recipe.sections.rollout import SamplingConfig
from areal_hpc.rundir.run_inputs import get_recipe_value

PRESET_KEY = "trainer.objective.preset"
LOSS_SCALE_KEY = "trainer.objective.loss_scale_tokens"
_MAX_TOKENS_KEY = "rollout.sampling.max_new_tokens"


@dataclass(frozen=True, slots=True)
class Preset:
    """Algorithm with its source, and the keys in which it differs from the default."""

    source: str
    objective: Mapping[str, Any]
    """Keys of `trainer.objective`, with nested sections."""
    values_outside_objective: Mapping[str, Any]
    """Dotted keys of other sections."""

    @property
    def values(self) -> dict[str, Any]:
        """Values of all keys that it sets, by dotted keys."""
        return flatten_keys(self.objective, "trainer.objective.") | dict(
            self.values_outside_objective
        )


PRESETS: Mapping[str, Preset] = {
    "default": Preset("decoupled PPO on group advantages, TIS", {}, {}),
    "grpo": Preset(
        "arXiv:2402.03300, section 4.1, without its kl.coef of 0.04; the clip is PPO's",
        {"clip_low": 0.2, "clip_high": 0.2, "loss_agg": "seq_mean_token_mean"},
        {},
    ),
    "dr_grpo": Preset(
        "arXiv:2503.20783, section 3.2",
        {
            "scale_rewards": "none",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "loss_agg": "seq_mean_token_sum_norm",
        },
        {},
    ),
    "dapo": Preset(
        "arXiv:2503.14476, section 3, which makes 16 updates of a batch; overlong.penalty needs "
        "lengths of your own",
        {"clip_low": 0.2, "clip_high": 0.28, "loss_agg": "token_mean"},
        {"rollout.filter_same_reward": True},
    ),
    "gspo": Preset(
        "arXiv:2507.18071, sections 4 and 5.1",
        {
            "ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_agg": "seq_mean_token_mean",
        },
        {"trainer.minibatches": 4},
    ),
    "cispo": Preset(
        "arXiv:2506.13585, section 3.1, which sets no lower bound, names no upper one and makes 16 "
        "updates of a batch",
        {"surrogate": "cispo", "clip_low": 1.0},
        {"trainer.minibatches": 4},
    ),
    "rloo": Preset(
        "arXiv:2402.14740, section 2.3, without its kl.coef of 0.03 to 0.1",
        {
            "baseline": "leave_one_out",
            "scale_rewards": "none",
            "surrogate": "none",
            "loss_agg": "seq_mean_token_sum",
        },
        {},
    ),
    "reinforce": Preset(
        "the policy gradient without a baseline",
        {
            "baseline": "none",
            "scale_rewards": "none",
            "surrogate": "none",
            "loss_agg": "seq_mean_token_sum",
        },
        {},
    ),
    "reinforce_pp": Preset(
        "arXiv:2501.03262v9, section 3.1; clip and kl.coef are those of v2",
        {
            "baseline": "batch_mean",
            "scale_rewards": "batch",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl": {"coef": 1e-3},
        },
        {},
    ),
    "reinforce_pp_baseline": Preset(
        "arXiv:2501.03262v9, section 3.2, with 3.1's penalty; clip and kl.coef are those of v2",
        {
            "baseline": "group_mean",
            "scale_rewards": "batch",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl": {"coef": 1e-3},
        },
        {},
    ),
    "ppo": Preset(
        "arXiv:1707.06347, section 3, with a critic of its own; arXiv:1506.02438, section 3",
        {
            "baseline": "value",
            "scale_rewards": "batch",
            "gae_lambda": 0.95,
            "discount": 1.0,
            "critic": {"model": "initial"},
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
        {},
    ),
    "icepop": Preset(
        "arXiv:2510.18855, section 2.3.2",
        {
            "off_policy_correction": "mask",
            "off_policy_correction_low": 0.5,
            "off_policy_correction_high": 5.0,
        },
        {},
    ),
    "opd": Preset(
        "on-policy distillation, arXiv:2306.13649, section 3.1, by sampled tokens as in "
        "thinkingmachines.ai/blog/on-policy-distillation; teacher.path or url is yours to set",
        {"teacher": {"coef": 1.0}},
        {},
    ),
    "max_rl": Preset(
        "the advantage of arXiv:2602.02710, for rewards of 0 and 1; all else is the default's",
        {"scale_rewards": "group_mean"},
        {},
    ),
    "dppo": Preset(
        "Binary-TV of arXiv:2602.04879, without its bound on ratios; the bounds of the mask are "
        "prime-rl's",
        {
            "surrogate": "dppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "proximal": "none",
            "off_policy_correction": "none",
        },
        {},
    ),
    "length_aware": Preset(
        "the bonus of prime-rl, github.com/PrimeIntellect-ai/prime-rl/pull/2265; all else is the "
        "default's",
        {"brevity_bonus": 1.0},
        {},
    ),
}


def apply_preset(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys of the preset that the recipe's tree lacks.

    Invalid values stay, and the recipe's model refuses them.
    """
    preset = PRESETS.get(str(get_recipe_value(tree, PRESET_KEY) or "default"), PRESETS["default"])
    for key, value in preset.values.items():
        tree = _set_default(tree, key, value)
    if get_recipe_value(tree, "trainer.objective.loss_agg") == "seq_mean_token_sum_norm":
        longest = get_recipe_value(tree, _MAX_TOKENS_KEY)
        if get_recipe_value(tree, LOSS_SCALE_KEY) is None:
            longest = longest or SamplingConfig().max_new_tokens
            tree = _set_default(_copy_without_key(tree, LOSS_SCALE_KEY), LOSS_SCALE_KEY, longest)
    return tree


def drop_values_of_former_preset(
    tree: Mapping[str, Any], preset_name: str, root: type[BaseConfig]
) -> Mapping[str, Any]:
    """Remove the values of a resolved recipe's preset, which another one replaces."""
    former_values = PRESETS.get(str(get_recipe_value(tree, PRESET_KEY)), PRESETS["default"]).values
    new_values = PRESETS[preset_name].values if preset_name in PRESETS else {}
    for key in dict.fromkeys([*former_values, *new_values]):
        if get_recipe_value(tree, key) == former_values.get(key, get_default(root, key)):
            tree = _copy_without_key(tree, key)
    if get_recipe_value(tree, "trainer.objective.loss_agg") is None:
        tree = _copy_without_key(tree, LOSS_SCALE_KEY)
    return tree


def describe_preset(tree: Mapping[str, Any]) -> Iterator[str]:
    """Describe the values of a resolved recipe's preset, and those that the recipe changes."""
    name = str(get_recipe_value(tree, PRESET_KEY))
    preset = PRESETS[name]
    if name == "default":
        return
    yield f"{PRESET_KEY}={name} ({preset.source})"
    for key, value in preset.values.items():
        actual = get_recipe_value(tree, key)
        origin = "preset" if actual == value else f"recipe; the preset has {value}"
        yield f"  {key}={actual}  ({origin})"


def get_default(root: type[BaseConfig], key: str) -> Any:
    """Return the default of a dotted key."""
    *sections, name = key.split(".")
    model = root
    for section in sections:
        inner = get_section_class(model.model_fields[section].annotation)
        assert inner is not None, key
        model = inner
    return model.model_fields[name].default


def _set_default(tree: Mapping[str, Any], key: str, value: Any) -> Mapping[str, Any]:
    head, _, rest = key.partition(".")
    if not rest:
        return {head: value, **tree}
    inner = tree.get(head, {})
    if inner is None or not isinstance(inner, Mapping):
        return tree
    return {**tree, head: _set_default(inner, rest, value)}


def _copy_without_key(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    head, _, rest = key.partition(".")
    if not rest:
        return {name: value for name, value in tree.items() if name != head}
    inner = tree.get(head)
    return {**tree, head: _copy_without_key(inner, rest)} if isinstance(inner, Mapping) else tree
