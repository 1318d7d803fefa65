"""Translation rules for AReaL's `actor`, `ref`, `critic` and `teacher` keys."""

import re
from pathlib import Path
from typing import Any

from areal_hpc.areal.config.allocation_mode import parse_trainer_backend
from areal_hpc.areal.config.rules import (
    ArealConfigValues,
    KeyRule,
    TranslateValue,
    Untranslatable,
    fixed_value_rule,
    ignored_rule,
    renamed_rule,
    repeated_run_key_rules,
    same_as_key_rule,
    unsupported_rule,
    unsupported_scheduling_rules,
)

SUPPORTED_LR_DECAYS = ("constant", "linear", "cosine")
PROXIMAL_MODE_BY_AREAL_NAME = {"recompute": "recompute", "loglinear": "log_linear"}
CUSTOM_LOSS_REASON = (
    "a custom loss: set trainer.objective.custom to a copy of examples/objectives/{}.py"
)
CORRECTION_METRIC_BY_AREAL_NAME = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "kl"}
REWARD_IGNORING_MIN_STD = 1e9
"""Of `trainer.objective.min_reward_std`: no rewards vary so much, so that none are learned from."""
REWARD_NORM_KEYS_TEXT = "`trainer.objective.baseline`, `scale_rewards` and `std_ddof`"


def _translate_eps_clip(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    higher = areal_values("actor.eps_clip_higher")
    return {
        "trainer.objective.clip_low": value,
        "trainer.objective.clip_high": value if higher is None else higher,
    }


def _translate_dtype(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if value not in ("bfloat16", "float32"):
        return Untranslatable("bfloat16 or float32")
    return {"trainer.dtype": value, "inference.dtype": value}


def _translate_decoupled_loss(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if not value and not areal_values("actor.recompute_logprob"):
        return {
            "trainer.objective.proximal": "none",
            "trainer.objective.off_policy_correction": "none",
        }
    method = areal_values("actor.prox_logp_method")
    if method not in PROXIMAL_MODE_BY_AREAL_NAME:
        return Untranslatable(
            f"actor.prox_logp_method is one of {', '.join(PROXIMAL_MODE_BY_AREAL_NAME)}"
        )
    found: dict[str, Any] = {"trainer.objective.proximal": PROXIMAL_MODE_BY_AREAL_NAME[method]}
    weighed = (
        _build_off_policy_correction_subkeys(areal_values)
        if value
        else {"off_policy_correction": "none"}
    )
    return found | {f"trainer.objective.{name}": value for name, value in weighed.items()}


def _build_off_policy_correction_subkeys(areal_values: ArealConfigValues) -> dict[str, Any]:
    if areal_values("actor.rejection_sampling.level") is not None:
        metric = areal_values("actor.rejection_sampling.metric")
        level, agg = (areal_values(f"actor.rejection_sampling.{name}") for name in ("level", "agg"))
        return {
            "off_policy_correction": areal_values("actor.rejection_sampling.action"),
            "off_policy_correction_level": level,
            **({"off_policy_correction_agg": agg} if level == "sequence" and agg != "mean" else {}),
            "off_policy_correction_metric": CORRECTION_METRIC_BY_AREAL_NAME.get(metric, "kl"),
            "off_policy_correction_low": _get_rejection_lower_bound(areal_values) or 0.0,
            "off_policy_correction_high": areal_values("actor.rejection_sampling.upper"),
        }
    cap = areal_values("actor.behav_imp_weight_cap")
    if cap is None:
        return {"off_policy_correction": "none"}
    return {"off_policy_correction": "mask", "off_policy_correction_high": cap}


def _get_rejection_lower_bound(areal_values: ArealConfigValues) -> float | None:
    lower = areal_values("actor.rejection_sampling.lower")
    is_never_negative = areal_values("actor.rejection_sampling.metric") in ("kl_k2", "kl_k3")
    return None if lower is None or (is_never_negative and lower <= 0) else float(lower)


def _check_rejection_lower(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    metric, lower = (
        areal_values("actor.rejection_sampling.metric"),
        _get_rejection_lower_bound(areal_values),
    )
    if metric == "ratio" or lower is None or (metric == "kl_k1" and lower < 0):
        return {}
    return Untranslatable(
        "bounds enclose the value of equal policies: that of k1 is negative, k2 and k3 have none"
    )


def _check_rejection_metric(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if value in CORRECTION_METRIC_BY_AREAL_NAME:
        return {}
    return Untranslatable(f"one of {', '.join(CORRECTION_METRIC_BY_AREAL_NAME)}")


def _translate_kl(value: Any, areal_values: ArealConfigValues) -> dict[str, Any] | Untranslatable:
    path = areal_values("ref.path")
    if not value or path is None:
        return {}
    if areal_values("actor.kl_estimator") != "k1":
        return Untranslatable("actor.kl_estimator is k1: others are biased in the reward")
    found = {"trainer.objective.kl.coef": value}
    if path not in ("", areal_values("actor.path")):
        found["trainer.objective.kl.reference"] = path
    return found


def _translate_betas(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    betas = (areal_values("actor.optimizer.beta1"), areal_values("actor.optimizer.beta2"))
    return {"trainer.optimizer.betas": list(betas)}


def _translate_lr_decay(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if value in SUPPORTED_LR_DECAYS:
        return {"trainer.optimizer.decay": value}
    return Untranslatable(f"one of {', '.join(SUPPORTED_LR_DECAYS)}")


def _translate_warmup(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if areal_values.total_steps is None:
        return Untranslatable("a recipe counts steps: set trainer.optimizer.warmup_steps")
    return {"trainer.optimizer.warmup_steps": round(float(value) * areal_values.total_steps)}


def _translate_weight_transport(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    ways = {"xccl": "broadcast", "nccl": "broadcast", "disk": "disk"}
    if value not in ways:
        return Untranslatable(f"one of {', '.join(ways)}")
    return {"weights.transport": ways[value]}


def _translate_weight_bucket_size(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    return {"weights.bucket_bytes": int(value) * 1024 * 1024}


def _translate_reward_norm(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    mean, std = (
        areal_values("actor.reward_norm.mean_level"),
        areal_values("actor.reward_norm.std_level"),
    )
    if std is not None and std != mean:
        return Untranslatable(
            "rewards are divided by the deviation from their own baseline: std_level is null, or "
            "the same as mean_level"
        )
    leaves_own_out = areal_values("actor.reward_norm.mean_leave1out")
    if leaves_own_out and (mean != "group" or std is not None):
        return Untranslatable("mean_leave1out goes with mean_level=group and std_level=null")
    baselines = {None: "none", "batch": "batch_mean", "group": "group_mean"}
    found: dict[str, Any] = {
        "trainer.objective.baseline": "leave_one_out" if leaves_own_out else baselines[mean],
        "trainer.objective.scale_rewards": std or "none",
    }
    if std is not None and not areal_values("actor.reward_norm.std_unbiased"):
        found["trainer.objective.std_ddof"] = 0
    return found


def _translate_critic(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if areal_values("actor.reward_norm.eps") is not None:
        return Untranslatable(
            "rewards that a critic learns are not normalized: leave actor.reward_norm out"
        )
    is_same = value in ("", areal_values("actor.path"))
    return {
        "trainer.objective.baseline": "value",
        "trainer.objective.scale_rewards": "none",
        "trainer.objective.critic.model": "initial" if is_same else value,
        "trainer.objective.discount": areal_values("actor.discount"),
        "trainer.objective.gae_lambda": areal_values("actor.gae_lambda"),
        "trainer.objective.gae_unit": areal_values("actor.gae_timestep_unit"),
    }


def _translate_teacher(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    rewards, coef = (
        areal_values("teacher.rl_loss_weight"),
        areal_values("teacher.distill_loss_weight"),
    )
    if not value or not coef:
        return {}  # nobody is learned from
    coef = coef / rewards if rewards else coef
    if _is_repository(value):
        return Untranslatable(
            f"a teacher is a folder: download {value}, set trainer.objective.teacher.path to where "
            f"it lies and coef to {coef:g}; or serve it and set url in the place of path"
        )
    if rewards:
        alone = {}
    elif areal_values("critic.path") is None:
        alone = {"trainer.objective.min_reward_std": REWARD_IGNORING_MIN_STD}
    else:
        return Untranslatable("a critic learns of rewards, which rl_loss_weight=0 leaves out")
    teacher = {"path": value, "coef": coef}
    return alone | {f"trainer.objective.teacher.{name}": one for name, one in teacher.items()}


def _check_rl_loss_weight(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if value in (0, 1) or not areal_values("teacher.path"):
        return {}
    divided = ", and coef is divided by it" if areal_values("teacher.distill_loss_weight") else ""
    return Untranslatable(
        f"rewards weigh 1{divided}: a loss that is larger as a whole differs in what "
        "trainer.optimizer.clip_grad clips"
    )


def _build_critic_only_check(neutral_value: Any) -> TranslateValue:
    def check(value: Any, areal_values: ArealConfigValues) -> dict[str, Any] | Untranslatable:
        if value == neutral_value or areal_values("critic.path") is not None:
            return {}
        return Untranslatable("without a critic a reward counts for the whole episode")

    return check


def _check_reward_scaling(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    is_scaled = areal_values("actor.reward_norm.eps") is None or areal_values(
        "actor.reward_norm.std_level"
    )
    if value == 1 or (is_scaled and areal_values("critic.path") is None):
        return {}
    return Untranslatable(
        "without std_level rewards are taken as they are: scale them in the agent"
    )


def _check_reward_bias(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    has_norm = areal_values("actor.reward_norm.eps") is not None
    learns_rewards = has_norm or areal_values("critic.path") is not None
    if value == 0 or not learns_rewards or areal_values("actor.reward_norm.mean_level"):
        return {}
    return Untranslatable("without mean_level rewards are taken as they are: add it in the agent")


def _check_group_size(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if value in (1, areal_values("gconfig.n_samples")):
        return {}
    return Untranslatable("a group is the rollout.n_samples episodes of a task")


def _translate_model(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    return {"model.hub" if _is_repository(value) else "model.path": value}


def _is_repository(model: Any) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(model))) and not Path(model).exists()


ACTOR_RULES = (
    KeyRule(
        "actor.path",
        "`model.path`, or `model.hub` for `owner/name` that is no folder",
        _translate_model,
        only_if_given=True,
    ),
    KeyRule("actor.backend", "`trainer.parallel.*`", parse_trainer_backend),
    *repeated_run_key_rules("actor", has_fileroot=False),
    KeyRule("actor.dtype", "`trainer.dtype` and `inference.dtype`", _translate_dtype),
    fixed_value_rule("actor.grad_reduce_dtype", "float32", "gradients are summed in float32"),
    renamed_rule("actor.mb_spec.max_tokens_per_mb", "trainer.max_tokens_per_microbatch"),
    fixed_value_rule(
        "actor.mb_spec.n_mbs",
        1,
        "the number of micro-batches follows from trainer.max_tokens_per_microbatch",
    ),
    fixed_value_rule("actor.mb_spec.granularity", 1, "rows are packed one by one"),
    fixed_value_rule("actor.optimizer.type", "adam", "AdamW is the only optimizer"),
    renamed_rule("actor.optimizer.lr", "trainer.optimizer.lr"),
    renamed_rule("actor.optimizer.weight_decay", "trainer.optimizer.weight_decay"),
    KeyRule("actor.optimizer.beta1", "`trainer.optimizer.betas`", _translate_betas),
    KeyRule("actor.optimizer.beta2", "`trainer.optimizer.betas`", _translate_betas),
    renamed_rule("actor.optimizer.eps", "trainer.optimizer.eps"),
    KeyRule("actor.optimizer.lr_scheduler_type", "`trainer.optimizer.decay`", _translate_lr_decay),
    renamed_rule("actor.optimizer.min_lr_ratio", "trainer.optimizer.min_lr_ratio"),
    KeyRule(
        "actor.optimizer.warmup_steps_proportion",
        "`trainer.optimizer.warmup_steps`: times the steps of the run",
        _translate_warmup,
    ),
    renamed_rule("actor.optimizer.gradient_clipping", "trainer.optimizer.clip_grad"),
    renamed_rule("actor.optimizer.offload", "trainer.offload.optimizer"),
    KeyRule("actor.weight_update_mode", "`weights.transport`", _translate_weight_transport),
    KeyRule(
        "actor.weight_chunked_mem_mb",
        "`weights.bucket_bytes`",
        _translate_weight_bucket_size,
        only_if_given=True,
    ),
    renamed_rule("actor.ppo_n_minibatches", "trainer.minibatches"),
    KeyRule(
        "actor.eps_clip",
        "`trainer.objective.clip_low`, and `clip_high` with it",
        _translate_eps_clip,
    ),
    ignored_rule("actor.eps_clip_higher", "`trainer.objective.clip_high`, by `actor.eps_clip`"),
    renamed_rule("actor.c_clip", "trainer.objective.clip_dual"),
    same_as_key_rule(
        "actor.temperature",
        "gconfig.temperature",
        "log-probabilities are at the temperature that each reply was sampled with",
    ),
    ignored_rule("actor.max_new_tokens", "it repeats `gconfig.max_new_tokens`"),
    KeyRule("actor.group_size", "as `rollout.n_samples`", _check_group_size),
    *(
        KeyRule(f"actor.reward_norm.{name}", REWARD_NORM_KEYS_TEXT, _translate_reward_norm)
        for name in ("mean_level", "std_level", "mean_leave1out", "std_unbiased")
    ),
    ignored_rule("actor.reward_norm.eps", "`trainer.objective.min_reward_std` guards the division"),
    KeyRule("actor.reward_norm.group_size", "as `rollout.n_samples`", _check_group_size),
    ignored_rule(
        "actor.reward_norm",
        "without the section, rewards are compared with their group's mean in its deviations",
    ),
    KeyRule(
        "actor.reward_scaling",
        "(not needed) it cancels out where differences are divided by their deviation",
        _check_reward_scaling,
    ),
    KeyRule(
        "actor.reward_bias",
        "(not needed) it cancels out where a baseline is subtracted",
        _check_reward_bias,
    ),
    unsupported_rule("actor.reward_clip", "rewards are not clipped; clip them in the agent"),
    fixed_value_rule(
        "actor.overlong_reward_penalty",
        False,
        "rewards are not scaled; return the scaled reward from the agent",
    ),
    renamed_rule("actor.mask_no_eos_with_zero", "trainer.objective.overlong.mask"),
    *(
        KeyRule(
            f"actor.{name}",
            f"`trainer.objective.{here}` where there is a `critic`; else always `{neutral}`",
            _build_critic_only_check(neutral),
        )
        for name, here, neutral in (
            ("discount", "discount", 1.0),
            ("gae_lambda", "gae_lambda", 1.0),
            ("gae_timestep_unit", "gae_unit", "token"),
        )
    ),
    unsupported_rule(
        "actor.adv_norm.*", "advantages are not normalized over the batch a second time"
    ),
    KeyRule(
        "actor.kl_ctl",
        "`trainer.objective.kl.coef` where there is a `ref`: taken off what a whole reply earned, "
        "before baseline and scale",
        _translate_kl,
    ),
    ignored_rule("actor.kl_estimator", "`trainer.objective.kl.estimator`, by `actor.kl_ctl`: k1"),
    KeyRule(
        "actor.use_decoupled_loss",
        "`trainer.objective.proximal`, with `recompute_logprob` and `prox_logp_method`",
        _translate_decoupled_loss,
    ),
    ignored_rule(
        "actor.recompute_logprob", "`trainer.objective.proximal`, by `use_decoupled_loss`"
    ),
    ignored_rule("actor.prox_logp_method", "`trainer.objective.proximal`, by `use_decoupled_loss`"),
    ignored_rule(
        "actor.behav_imp_weight_cap", "`trainer.objective.off_policy_correction_high`, as a mask"
    ),
    ignored_rule(
        "actor.rejection_sampling.level", "`trainer.objective.off_policy_correction_level`"
    ),
    ignored_rule("actor.rejection_sampling.action", "`trainer.objective.off_policy_correction`"),
    KeyRule(
        "actor.rejection_sampling.metric",
        "`trainer.objective.off_policy_correction_metric`",
        _check_rejection_metric,
    ),
    ignored_rule(
        "actor.rejection_sampling.agg",
        "`trainer.objective.off_policy_correction_agg`, where the level is `sequence`",
    ),
    ignored_rule(
        "actor.rejection_sampling.upper", "`trainer.objective.off_policy_correction_high`"
    ),
    KeyRule(
        "actor.rejection_sampling.lower",
        "`trainer.objective.off_policy_correction_low`",
        _check_rejection_lower,
    ),
    renamed_rule("actor.importance_sampling_level", "trainer.objective.ratio_level"),
    KeyRule(
        "actor.use_sapo_loss",
        f"(none) if it is true: {CUSTOM_LOSS_REASON.format('sapo')}",
        lambda value, _: Untranslatable(CUSTOM_LOSS_REASON.format("sapo")) if value else {},
    ),
    unsupported_rule("actor.sapo_tau_pos", "a constant of examples/objectives/sapo.py"),
    unsupported_rule("actor.sapo_tau_neg", "a constant of examples/objectives/sapo.py"),
    unsupported_rule("actor.m2_threshold", CUSTOM_LOSS_REASON.format("m2po")),
    renamed_rule("actor.dynamic_sampling", "rollout.filter_same_reward"),
    ignored_rule("actor.log_agent_stats", "`metrics.jsonl` has them"),
    fixed_value_rule("actor.init_from_scratch", False, "a model starts from its directory"),
    fixed_value_rule("actor.is_critic", False, "the policy gives no values"),
    ignored_rule(
        "actor.disable_dropout", "dropout is always off: it would add noise to importance ratios"
    ),
    KeyRule(
        "actor.gradient_checkpointing",
        "`trainer.recompute`: `full` or `none`",
        lambda value, _: {"trainer.recompute": "full" if value else "none"},
    ),
    fixed_value_rule("actor.pad_to_maximum", False, "rows are packed without padding"),
    fixed_value_rule(
        "actor.enable_tree_training",
        False,
        "prefix sharing is not implemented: rows with a common prefix are packed separately",
    ),
    ignored_rule("actor.attn_impl", "Megatron's own attention, or PyTorch's on a CPU"),
    fixed_value_rule("actor.use_lora", False, "all parameters are trained"),
    unsupported_rule("actor.fsdp.*", "the trainer is Megatron-core"),
    unsupported_rule("actor.megatron.*", "Megatron-core is configured by `trainer.*` alone"),
    unsupported_rule("actor.archon.*", "the trainer is Megatron-core"),
    *unsupported_scheduling_rules("actor"),
    ignored_rule("ref.path", "`trainer.objective.kl.reference`, by `actor.kl_ctl`"),
    ignored_rule("ref.*", "the reference is divided and packed as the policy is"),
    KeyRule(
        "critic.path",
        "`trainer.objective.critic.model`, with `baseline=value` and `scale_rewards=none`; an "
        "episode that was cut ends there, where AReaL goes on from the last value",
        _translate_critic,
    ),
    renamed_rule("critic.optimizer.lr", "trainer.objective.critic.lr"),
    renamed_rule("critic.eps_clip", "trainer.objective.critic.clip_value"),
    *(
        same_as_key_rule(f"critic.{name}", f"actor.{name}", "the critic is trained as the policy")
        for name in (
            "backend",
            "dtype",
            "ppo_n_minibatches",
            "mask_no_eos_with_zero",
            "optimizer.type",
            "optimizer.weight_decay",
            "optimizer.beta1",
            "optimizer.beta2",
            "optimizer.eps",
            "optimizer.lr_scheduler_type",
            "optimizer.min_lr_ratio",
            "optimizer.warmup_steps_proportion",
            "optimizer.gradient_clipping",
        )
    ),
    ignored_rule("critic.*", "the critic is divided and packed as the policy is"),
    KeyRule(
        "teacher.path",
        "`trainer.objective.teacher.path`, a folder, and `coef`: `teacher.distill_loss_weight` "
        "over `rl_loss_weight`; where that is 0, `min_reward_std` keeps rewards out of advantages",
        _translate_teacher,
    ),
    ignored_rule("teacher.distill_loss_weight", "`trainer.objective.teacher.coef`, by `path`"),
    KeyRule(
        "teacher.rl_loss_weight",
        "by `teacher.path`; 0 or 1, for rewards weigh 1",
        _check_rl_loss_weight,
    ),
    same_as_key_rule("teacher.dtype", "actor.dtype", "the teacher computes as the policy does"),
    same_as_key_rule(
        "teacher.temperature",
        "actor.temperature",
        "the teacher's log-probabilities are at the temperature that each reply was sampled with",
    ),
    ignored_rule(
        "teacher.*",
        "the teacher is divided and packed as the policy is; one of another layout is "
        "served, by `trainer.objective.teacher.url`",
    ),
)
"""What becomes of each."""
