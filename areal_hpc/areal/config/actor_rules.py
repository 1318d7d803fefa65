"""Rules for `actor` and the models beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from areal_hpc.areal_config.placement import of_trainer
from areal_hpc.areal_config.rules import (
    Lost,
    Source,
    always,
    anyway,
    computed,
    lost,
    renamed,
    same_as,
)

DECAYS = ("constant", "linear", "cosine")
NO_REFERENCE = "no reference model: nothing here is drawn back to one (`actor.kl_ctl` is 0)"
PROXIMAL = {"recompute": "recompute", "loglinear": "log_linear"}
IN_GROUPS = "a reward is always compared with its group: mean and deviation of the group"


def _clip(value: Any, source: Source) -> dict[str, Any]:
    higher = source("actor.eps_clip_higher")
    return {
        "trainer.objective.clip_low": value,
        "trainer.objective.clip_high": value if higher is None else higher,
    }


def _dtype(value: Any, source: Source) -> dict[str, Any] | Lost:
    if value not in ("bfloat16", "float32"):
        return Lost("bfloat16 or float32")
    return {"trainer.dtype": value, "inference.dtype": value}


def _proximal(value: Any, source: Source) -> dict[str, Any] | Lost:
    """The policy that ratios are to; `value` is that of `use_decoupled_loss`."""
    if not value and not source("actor.recompute_logprob"):
        return {"trainer.objective.proximal": "none", "trainer.objective.correction": "none"}
    method = source("actor.prox_logp_method")
    if method not in PROXIMAL:
        return Lost(f"actor.prox_logp_method is one of {', '.join(PROXIMAL)}")
    found: dict[str, Any] = {"trainer.objective.proximal": PROXIMAL[method]}
    weighed = _correction(source) if value else {"correction": "none"}
    return found | {f"trainer.objective.{name}": value for name, value in weighed.items()}


def _correction(source: Source) -> dict[str, Any]:
    """What AReaL calls rejection sampling, or capped the importance weight with before."""
    if source("actor.rejection_sampling.level") is not None:
        metric = source("actor.rejection_sampling.metric")
        return {
            "correction": source("actor.rejection_sampling.action"),
            "correction_level": source("actor.rejection_sampling.level"),
            "correction_metric": "ratio" if metric == "ratio" else "kl",
            "correction_low": source("actor.rejection_sampling.lower") or 0.0,
            "correction_high": source("actor.rejection_sampling.upper"),
        }
    cap = source("actor.behav_imp_weight_cap")
    if cap is None:
        return {"correction": "none"}
    return {"correction": "mask", "correction_high": cap}


def _metric(value: Any, source: Source) -> dict[str, Any] | Lost:
    if value in ("ratio", "kl_k3"):
        return {}
    return Lost("ratio, or kl_k3: the estimate of the divergence that is used here")


def _betas(value: Any, source: Source) -> dict[str, Any]:
    betas = (source("actor.optimizer.beta1"), source("actor.optimizer.beta2"))
    return {"trainer.optimizer.betas": list(betas)}


def _decay(value: Any, source: Source) -> dict[str, Any] | Lost:
    if value in DECAYS:
        return {"trainer.optimizer.decay": value}
    return Lost(f"one of {', '.join(DECAYS)}")


def _warmup(value: Any, source: Source) -> dict[str, Any] | Lost:
    if source.total_steps is None:
        return Lost("a recipe counts steps: set trainer.optimizer.warmup_steps")
    return {"trainer.optimizer.warmup_steps": round(float(value) * source.total_steps)}


def _transport(value: Any, source: Source) -> dict[str, Any] | Lost:
    ways = {"xccl": "broadcast", "nccl": "broadcast", "disk": "disk"}
    if value not in ways:
        return Lost(f"one of {', '.join(ways)}")
    return {"weights.transport": ways[value]}


def _bucket(value: Any, source: Source) -> dict[str, Any]:
    return {"weights.bucket_bytes": int(value) * 1024 * 1024}


def _level(value: Any, source: Source) -> dict[str, Any] | Lost:
    return {} if value == "group" else Lost(IN_GROUPS)


def _group_size(value: Any, source: Source) -> dict[str, Any] | Lost:
    if value in (1, source("gconfig.n_samples")):
        return {}
    return Lost("a group is the rollout.n_samples episodes of a task")


def _model(value: Any, source: Source) -> dict[str, Any]:
    """AReaL loads what is a folder from there, and all else from the hub."""
    is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)) and not Path(value).exists()
    return {"model.hub" if is_repository else "model.path": value}


ACTOR_RULES = (
    computed(
        "actor.path",
        "`model.path`, or `model.hub` for `owner/name` that is no folder",
        _model,
        only_if_given=True,
    ),
    computed("actor.backend", "`trainer.parallel.*`", of_trainer),
    same_as("actor.experiment_name", "experiment_name", "a run has one name"),
    same_as("actor.trial_name", "trial_name", "a run has one name"),
    computed("actor.dtype", "`trainer.dtype` and `inference.dtype`", _dtype),
    always("actor.grad_reduce_dtype", "float32", "gradients are summed in float32"),
    renamed("actor.mb_spec.max_tokens_per_mb", "trainer.max_tokens_per_microbatch"),
    always("actor.mb_spec.n_mbs", 1, "micro-batches are as many as their tokens need"),
    always("actor.mb_spec.granularity", 1, "rows are packed one by one"),
    always("actor.optimizer.type", "adam", "AdamW is the only optimizer"),
    renamed("actor.optimizer.lr", "trainer.optimizer.lr"),
    renamed("actor.optimizer.weight_decay", "trainer.optimizer.weight_decay"),
    computed("actor.optimizer.beta1", "`trainer.optimizer.betas`", _betas),
    computed("actor.optimizer.beta2", "`trainer.optimizer.betas`", _betas),
    renamed("actor.optimizer.eps", "trainer.optimizer.eps"),
    computed("actor.optimizer.lr_scheduler_type", "`trainer.optimizer.decay`", _decay),
    renamed("actor.optimizer.min_lr_ratio", "trainer.optimizer.min_lr_ratio"),
    computed(
        "actor.optimizer.warmup_steps_proportion",
        "`trainer.optimizer.warmup_steps`: times the steps of the run",
        _warmup,
    ),
    renamed("actor.optimizer.gradient_clipping", "trainer.optimizer.clip_grad"),
    always("actor.optimizer.offload", False, "the optimizer stays on its device"),
    computed("actor.weight_update_mode", "`weights.transport`", _transport),
    computed("actor.weight_chunked_mem_mb", "`weights.bucket_bytes`", _bucket, only_if_given=True),
    renamed("actor.ppo_n_minibatches", "trainer.minibatches"),
    computed("actor.eps_clip", "`trainer.objective.clip_low`, and `clip_high` with it", _clip),
    anyway("actor.eps_clip_higher", "`trainer.objective.clip_high`, by `actor.eps_clip`"),
    lost("actor.c_clip", "no second bound for negative advantages"),
    same_as(
        "actor.temperature",
        "gconfig.temperature",
        "log-probabilities are at the temperature that each reply was sampled with",
    ),
    anyway("actor.max_new_tokens", "it repeats `gconfig.max_new_tokens`"),
    computed("actor.group_size", "as `rollout.n_samples`", _group_size),
    computed("actor.reward_norm.mean_level", IN_GROUPS, _level, only_if_given=True),
    computed("actor.reward_norm.std_level", IN_GROUPS, _level, only_if_given=True),
    always("actor.reward_norm.mean_leave1out", False, IN_GROUPS),
    anyway("actor.reward_norm.std_unbiased", "it scales all advantages of a group size alike"),
    anyway("actor.reward_norm.eps", "`trainer.objective.min_reward_std` guards the division"),
    computed("actor.reward_norm.group_size", "as `rollout.n_samples`", _group_size),
    anyway("actor.reward_norm", f"{IN_GROUPS}, without this section too"),
    anyway("actor.reward_scaling", "it cancels out when a reward is compared with its group"),
    anyway("actor.reward_bias", "it cancels out when a reward is compared with its group"),
    lost("actor.reward_clip", "rewards are taken as they are: bound them in the agent"),
    always("actor.overlong_reward_penalty", False, "return the reward you mean from the agent"),
    always("actor.mask_no_eos_with_zero", False, "replies that were cut keep their reward"),
    always("actor.discount", 1.0, "a reward counts for the whole row; see `turn_discount`"),
    always("actor.gae_lambda", 1.0, "there is no critic"),
    always("actor.gae_timestep_unit", "token", "there is no critic"),
    lost("actor.adv_norm.*", "advantages are not normalised over the batch a second time"),
    always("actor.kl_ctl", 0.0, "no penalty for leaving a reference model"),
    anyway("actor.kl_estimator", "it belongs to `actor.kl_ctl`"),
    computed(
        "actor.use_decoupled_loss",
        "`trainer.objective.proximal`, with `recompute_logprob` and `prox_logp_method`",
        _proximal,
    ),
    anyway("actor.recompute_logprob", "`trainer.objective.proximal`, by `use_decoupled_loss`"),
    anyway("actor.prox_logp_method", "`trainer.objective.proximal`, by `use_decoupled_loss`"),
    anyway("actor.behav_imp_weight_cap", "`trainer.objective.correction_high`, as a mask"),
    anyway("actor.rejection_sampling.level", "`trainer.objective.correction_level`"),
    anyway("actor.rejection_sampling.action", "`trainer.objective.correction`"),
    computed("actor.rejection_sampling.metric", "`trainer.objective.correction_metric`", _metric),
    always("actor.rejection_sampling.agg", "mean", "rows are judged by their mean"),
    anyway("actor.rejection_sampling.upper", "`trainer.objective.correction_high`"),
    anyway("actor.rejection_sampling.lower", "`trainer.objective.correction_low`"),
    always("actor.importance_sampling_level", "token", "ratios are of tokens"),
    renamed("actor.dynamic_sampling", "rollout.filter_same_reward"),
    anyway("actor.log_agent_stats", "`metrics.jsonl` has them"),
    always("actor.init_from_scratch", False, "a model starts from its directory"),
    always("actor.is_critic", False, "there is no critic"),
    anyway("actor.disable_dropout", "dropout is off: ratios would be noise with it"),
    always(
        "actor.gradient_checkpointing",
        False,
        "activations are kept: use smaller micro-batches, or more tensor or context parallel ranks",
    ),
    always("actor.pad_to_maximum", False, "rows are packed without padding"),
    always("actor.enable_tree_training", False, "rows that share a beginning are packed apart"),
    anyway("actor.attn_impl", "Megatron's own attention, or PyTorch's on a CPU"),
    always("actor.use_lora", False, "all parameters are trained"),
    lost("actor.fsdp.*", "the trainer is Megatron-core"),
    lost("actor.megatron.*", "Megatron-core is configured by `trainer.*` alone"),
    lost("actor.archon.*", "the trainer is Megatron-core"),
    lost("actor.scheduling_spec.*", "what a job asks Slurm for is in the section `cluster`"),
    lost("actor.scheduling_strategy.*", "trainer and replicas have nodes of their own"),
    lost("ref.*", NO_REFERENCE),
    lost("critic.*", "advantages come from groups: there is no critic"),
    lost("teacher.*", "there is no distillation"),
)
"""What becomes of each."""
