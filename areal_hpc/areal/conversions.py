"""Functions that `convert` in `rules.yaml` names: from a value of AReaL to keys of a recipe.

Each gets AReaL's key, its value (never None, except for `concurrent_episodes`) and the whole
configuration. It returns the recipe's keys with their values, or nothing if none has to be set, and
raises `UntranslatableError` if there is no counterpart.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.areal.rules import ArealConfig, UntranslatableError
from areal_hpc.dataset.adapters import convert_gsm8k
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION

NO_TOP_K = 100_000_000
"""AReaL's value of `top_k` for no bound."""
TOOL_PARSER_BY_AREAL_NAME = {"qwen": "qwen25"}
NEUTRAL_SAMPLING_VALUES = {"top_p": 1.0, "top_k": -1}
STEPS_KEY_BY_SECTION = {
    "saver": "trainer.export_every_steps",
    "evaluator": "evaluation.every_steps",
    "recover": "trainer.checkpoint_every_steps",
}
CONTEXT_LENGTH_KEYS = (
    "gconfig.max_tokens",
    "sglang.context_length",
    "rollout.agent.engine_max_tokens",
)
BASELINES = {None: "none", "batch": "batch_mean", "group": "group_mean"}
PROXIMAL_MODES = {"recompute": "recompute", "loglinear": "log_linear"}
CORRECTION_METRICS = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "kl"}
REWARD_IGNORING_MIN_STD = 1e9
"""Value of `trainer.objective.min_reward_std` above all deviations, so rewards have no effect."""
OBJECTIVE = "trainer.objective"
ENGINE_NAMES = ("sglang", "vllm")
TRAINER_NAMES = ("fsdp", "megatron", "archon")


def map_areal_module(dotted_path: str) -> str:
    """Replace `areal.` at the beginning of a dotted path by `areal_hpc.areal.`."""
    return f"areal_hpc.{dotted_path}" if dotted_path.startswith("areal.") else dotted_path


def map_areal_path_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `map_areal_module` to an agent's arguments that are dotted paths (`..._path`)."""
    return {
        name: map_areal_module(value)
        if name.endswith("_path") and isinstance(value, str)
        else value
        for name, value in kwargs.items()
    }


# The run, its data and its schedule.


def total_steps(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if areal.total_steps is None:
        raise UntranslatableError(
            "a recipe counts steps: set trainer.total_steps to the epochs times the rows of the "
            "training set, divided by trainer.batch_size"
        )
    return {"trainer.total_steps": areal.total_steps}


def epochs(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    target = STEPS_KEY_BY_SECTION[key.split(".")[0]]
    if areal.steps_per_epoch is None:
        raise UntranslatableError(f"a recipe counts steps: set {target}")
    return {target: int(value) * areal.steps_per_epoch}


def evaluation_workflow(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if not value or value == areal.get("workflow"):
        return {}
    return {"evaluation.workflow": map_areal_module(str(value))}


def scheduler(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value == "ray":
        raise UntranslatableError("jobs run on this machine or on Slurm")
    return {}


def build_gsm8k_source(path_or_hub_name: str, split: str) -> dict[str, str] | None:
    """Build a task set's keys for GSM8K's repository or a clone; `split` is train or test."""
    if Path(path_or_hub_name).name != "gsm8k":
        return None
    to_task = f"{convert_gsm8k.__module__}:{convert_gsm8k.__name__}"
    return {"hub": f"{path_or_hub_name}/main/{split}-*.parquet", "to_task": to_task}


def task_set(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if not value:
        return {}
    if str(value).endswith((".jsonl", ".json", ".parquet")):
        return {key: value}
    section, split = key.split(".")[0], "train" if key.startswith("train") else "test"
    if _is_repository(value):
        source = build_gsm8k_source(str(value), split)
        if source is not None:
            return {f"{section}.{name}": key_value for name, key_value in source.items()}
        raise UntranslatableError(
            f"set {section}.hub={value}/FILES, FILES being a pattern of its files, and "
            f"{section}.to_task to a function that makes a task of a row"
        )
    raise UntranslatableError(
        f"a recipe reads files: set {section}.path to one of JSON lines or Parquet; PPOTrainer "
        "takes rows as they are"
    )


# Generation.


def sampling(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    name = key.removeprefix("gconfig.")
    train_key, evaluation_key = f"rollout.sampling.{name}", f"evaluation.sampling.{name}"
    eval_value = areal.get(f"eval_gconfig.{name}")
    train, evaluation = (
        -1 if name == "top_k" and number >= NO_TOP_K else number
        for number in (value, value if eval_value is None else eval_value)
    )
    if name == "top_k" and train > MAX_MASK_TOKENS_PER_POSITION:
        raise UntranslatableError(
            f"at most {MAX_MASK_TOKENS_PER_POSITION}, or no bound; set {evaluation_key}"
        )
    keys = {train_key: train, evaluation_key: evaluation}
    if train != NEUTRAL_SAMPLING_VALUES.get(name, train):
        keys["rollout.record_sampling_mask"] = True  # training then uses the sampling distribution
    return keys


def context_length(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    stated = [areal.get(bound) for bound in CONTEXT_LENGTH_KEYS if bound in areal.stated]
    return {"inference.context_length": min(int(bound) for bound in stated if bound is not None)}


def concurrent_episodes(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    """Convert AReaL's number of groups, by default a batch's, to a number of episodes."""
    groups = int(value or areal.get("train_dataset.batch_size"))
    return {"rollout.max_concurrent_rollouts": groups * int(areal.get("gconfig.n_samples"))}


def batch_size(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value not in (1, areal.get("train_dataset.batch_size")):
        raise UntranslatableError("a batch is trainer.batch_size tickets")
    return {}


def turn_discount(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value == 1:
        return {}
    return {f"{OBJECTIVE}.credit": "turn", f"{OBJECTIVE}.turn_discount": value}


def tool_parser(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if not value:
        return {}
    # Frameworks offer strict tools by default, which are sampled, and so trained, with a grammar.
    parser = TOOL_PARSER_BY_AREAL_NAME.get(value, value)
    return {"inference.tool_call_parser": parser, "rollout.record_sampling_mask": True}


def sglang_argument(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value is False or value in ({}, []):
        return {}
    flag = "--" + key.removeprefix("sglang.").replace("_", "-")
    values = value if isinstance(value, list) else [] if value is True else [value]
    return {"inference.extra_args": [flag, *map(str, values)]}


# The trainer.


def model(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    return {"model.hub" if _is_repository(value) else "model.path": value}


def dtype(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value not in ("bfloat16", "float32"):
        raise UntranslatableError("bfloat16 or float32")
    return {"trainer.dtype": value}


def betas(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    betas = [areal.get(f"actor.optimizer.{name}") for name in ("beta1", "beta2")]
    return {"trainer.optimizer.betas": betas}


def warmup(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if areal.total_steps is None:
        raise UntranslatableError("a recipe counts steps: set trainer.optimizer.warmup_steps")
    return {"trainer.optimizer.warmup_steps": round(float(value) * areal.total_steps)}


def bucket_bytes(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    return {"weights.bucket_bytes": int(value) * 1024 * 1024}


# The objective.


def clip(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    higher = areal.get("actor.eps_clip_higher")
    return {
        f"{OBJECTIVE}.clip_low": value,
        f"{OBJECTIVE}.clip_high": value if higher is None else higher,
    }


def group_size(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value not in (1, areal.get("gconfig.n_samples")):
        raise UntranslatableError("a group is the rollout.n_samples episodes of a task")
    return {}


def reward_norm(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    mean = areal.get("actor.reward_norm.mean_level")
    std = areal.get("actor.reward_norm.std_level")
    leaves_own_out = areal.get("actor.reward_norm.mean_leave1out")
    if std is not None and std != mean:
        raise UntranslatableError(
            "rewards are divided by the deviation from their own baseline: std_level is null, or "
            "the same as mean_level"
        )
    if leaves_own_out and (mean != "group" or std is not None):
        raise UntranslatableError("mean_leave1out goes with mean_level=group and std_level=null")
    keys = {
        f"{OBJECTIVE}.baseline": "leave_one_out" if leaves_own_out else BASELINES[mean],
        f"{OBJECTIVE}.scale_rewards": std or "none",
    }
    if std is not None and not areal.get("actor.reward_norm.std_unbiased"):
        return {**keys, f"{OBJECTIVE}.std_ddof": 0}
    return keys


def reward_scaling(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    divides = not _has_reward_norm(areal) or areal.get("actor.reward_norm.std_level")
    if value != 1 and (not divides or _has_critic(areal)):
        raise UntranslatableError(
            "without std_level rewards are taken as they are: scale them in the agent"
        )
    return {}


def reward_bias(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    uses_norm_or_critic = _has_reward_norm(areal) or _has_critic(areal)
    if value != 0 and uses_norm_or_critic and not areal.get("actor.reward_norm.mean_level"):
        raise UntranslatableError(
            "without mean_level rewards are taken as they are: add it in the agent"
        )
    return {}


def critic_only(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    """Check discounts and their unit, which `critic` converts; 1.0 and `token` have no effect."""
    if value not in (1.0, "token") and not _has_critic(areal):
        raise UntranslatableError("without a critic a reward counts for the whole episode")
    return {}


def kl(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    reference = areal.get("ref.path")
    if not value or reference is None:
        return {}
    if areal.get("actor.kl_estimator") != "k1":
        raise UntranslatableError("actor.kl_estimator is k1: others are biased in the reward")
    if reference in ("", areal.get("actor.path")):
        return {f"{OBJECTIVE}.kl.coef": value}
    return {f"{OBJECTIVE}.kl.coef": value, f"{OBJECTIVE}.kl.reference": reference}


def decoupled_loss(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    correction = f"{OBJECTIVE}.off_policy_correction"
    if not value and not areal.get("actor.recompute_logprob"):
        return {f"{OBJECTIVE}.proximal": "none", correction: "none"}
    method = areal.get("actor.prox_logp_method")
    if method not in PROXIMAL_MODES:
        raise UntranslatableError(f"actor.prox_logp_method is one of {', '.join(PROXIMAL_MODES)}")
    keys: dict[str, Any] = {
        f"{OBJECTIVE}.proximal": PROXIMAL_MODES[method],
        correction: "none",
    }
    cap = areal.get("actor.behav_imp_weight_cap")
    rejection = {
        name: areal.get(f"actor.rejection_sampling.{name}")
        for name in ("level", "action", "metric", "agg", "upper")
    }
    if not value:
        return keys
    if rejection["level"] is not None:
        keys |= {
            correction: rejection["action"],
            f"{correction}_level": rejection["level"],
            f"{correction}_metric": CORRECTION_METRICS.get(rejection["metric"], "kl"),
            f"{correction}_low": _get_rejection_lower_bound(areal) or 0.0,
            f"{correction}_high": rejection["upper"],
        }
        if rejection["level"] == "sequence" and rejection["agg"] != "mean":
            keys[f"{correction}_agg"] = rejection["agg"]
    elif cap is not None:
        keys |= {correction: "mask", f"{correction}_high": cap}
    return keys


def rejection_metric(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value not in CORRECTION_METRICS:
        raise UntranslatableError(f"one of {', '.join(CORRECTION_METRICS)}")
    return {}


def rejection_lower(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    metric = areal.get("actor.rejection_sampling.metric")
    lower = _get_rejection_lower_bound(areal)
    if metric == "ratio" or lower is None or (metric == "kl_k1" and lower < 0):
        return {}
    raise UntranslatableError(
        "bounds enclose the value of equal policies: that of k1 is negative, k2 and k3 have none"
    )


def critic(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if _has_reward_norm(areal):
        raise UntranslatableError(
            "rewards that a critic learns are not normalized: leave actor.reward_norm out"
        )
    is_same = value in ("", areal.get("actor.path"))
    return {
        f"{OBJECTIVE}.baseline": "value",
        f"{OBJECTIVE}.scale_rewards": "none",
        f"{OBJECTIVE}.critic.model": "initial" if is_same else value,
        f"{OBJECTIVE}.discount": areal.get("actor.discount"),
        f"{OBJECTIVE}.gae_lambda": areal.get("actor.gae_lambda"),
        f"{OBJECTIVE}.gae_unit": areal.get("actor.gae_timestep_unit"),
    }


def teacher(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    reward_weight = areal.get("teacher.rl_loss_weight")
    coef = areal.get("teacher.distill_loss_weight")
    if not value or not coef:
        return {}  # there is no distillation
    coef = coef / reward_weight if reward_weight else coef
    if _is_repository(value):
        raise UntranslatableError(
            f"a teacher is a folder: download {value}, set trainer.objective.teacher.path to where "
            f"it lies and coef to {coef:g}; or serve it and set url in the place of path"
        )
    keys = {f"{OBJECTIVE}.teacher.path": value, f"{OBJECTIVE}.teacher.coef": coef}
    if reward_weight:
        return keys
    if _has_critic(areal):
        raise UntranslatableError("a critic needs rewards, which rl_loss_weight=0 leaves out")
    return {**keys, f"{OBJECTIVE}.min_reward_std": REWARD_IGNORING_MIN_STD}


def reward_weight(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if value in (0, 1) or not areal.get("teacher.path"):
        return {}
    divided = ", and coef is divided by it" if areal.get("teacher.distill_loss_weight") else ""
    raise UntranslatableError(
        f"rewards weigh 1{divided}: a factor of the whole loss would only change the effect of "
        "trainer.optimizer.clip_grad"
    )


def _get_rejection_lower_bound(areal: ArealConfig) -> float | None:
    lower = areal.get("actor.rejection_sampling.lower")
    is_never_negative = areal.get("actor.rejection_sampling.metric") in ("kl_k2", "kl_k3")
    return None if lower is None or (is_never_negative and lower <= 0) else float(lower)


def _has_reward_norm(areal: ArealConfig) -> bool:
    return areal.get("actor.reward_norm.eps") is not None


def _has_critic(areal: ArealConfig) -> bool:
    return areal.get("critic.path") is not None


def _is_repository(model: Any) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(model))) and not Path(model).exists()


# Layouts: `sglang:d4t2`, `megatron:d4t2p2c1e1`, and both in the older `sglang:d4+megatron:d4`.


def allocation_mode(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    if not value:
        return {}
    generating, plus, training = str(value).partition("+")
    if not plus:
        raise UntranslatableError(
            "one part only: a recipe has replicas and trainer ranks, side by side"
        )
    if not _parse_backend_name(training):
        training = f"fsdp:{training}"
    return engine_backend(key, generating, areal) | trainer_backend(key, training, areal)


def engine_backend(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    """Convert a layout of servers to one cell for each node, with the replicas that fit."""
    if not value:
        return {}
    name, sizes = _parse_backend_name(str(value)), _parse_sizes(str(value))
    if name == "vllm":
        raise UntranslatableError("SGLang serves here: write sglang")
    if sizes is None or name not in ("sglang", ""):
        raise UntranslatableError("not a layout of the form sglang:d4t2")
    if sizes.get("p", 1) > 1:
        raise UntranslatableError("a replica is not split over pipeline stages: use t")
    tp, replicas = sizes.get("t", 1), sizes.get("d", 1)
    replicas_per_node = max(1, int(areal.get("cluster.n_gpus_per_node") or 1) // tp)
    per_cell = next(n for n in range(min(replicas_per_node, replicas), 0, -1) if replicas % n == 0)
    return {
        "inference.cells": replicas // per_cell,
        "inference.replicas_per_cell": per_cell,
        "inference.tp": tp,
    }


def trainer_backend(key: str, value: Any, areal: ArealConfig) -> dict[str, Any]:
    """Convert a layout of FSDP, Megatron or Archon to Megatron's ranks."""
    if not value:
        return {}
    if _parse_backend_name(str(value)) not in TRAINER_NAMES:
        raise UntranslatableError(f"not a layout of one of {', '.join(TRAINER_NAMES)}")
    hybrid = re.search(r"attn:([^|)]+)\|ffn:([^)]+)", str(value))
    sizes = _parse_sizes(hybrid[1] if hybrid else str(value))
    experts = _parse_sizes(hybrid[2]) if hybrid else sizes
    if sizes is None or experts is None:
        raise UntranslatableError("not a layout of the form megatron:d4t2p2c1e1")
    if "s" in sizes:
        raise UntranslatableError("Megatron's sequence parallelism comes with t: leave s out")
    if hybrid and experts.get("t", 1) != 1:
        raise UntranslatableError("experts are not split by tensors of their own: use e for them")
    parallel = {"dp": "d", "tp": "t", "pp": "p", "cp": "c"}
    keys = {f"trainer.parallel.{name}": sizes.get(letter, 1) for name, letter in parallel.items()}
    return {**keys, "trainer.parallel.ep": experts.get("e", 1)}


def _parse_backend_name(text: str) -> str:
    match = re.match(r"\s*([a-z]+)\s*[:.]", text)
    return match[1] if match and match[1] in (*ENGINE_NAMES, *TRAINER_NAMES) else ""


def _parse_sizes(text: str) -> dict[str, int] | None:
    letters = re.sub(r"^[a-z]+[:.]", "", text.strip()).strip("() ")
    if not re.fullmatch(r"(?:[dtpcse]\d+)+", letters):
        return None
    return {letter: int(size) for letter, size in re.findall(r"([dtpcse])(\d+)", letters)}
