"""Rules for `rollout`, `gconfig` and `sglang`: what generates, and how much."""

from __future__ import annotations

from typing import Any

from areal_hpc.areal_config.placement import of_engine
from areal_hpc.areal_config.rules import (
    Lost,
    Rule,
    Source,
    always,
    anyway,
    computed,
    lost,
    renamed,
    same_as,
)

ALL_TOKENS = 100_000_000
"""AReaL's `top_k` for no bound."""
PARSERS = {"qwen": "qwen25"}
"""AReaL's names of SGLang's parsers, where they differ."""


def _concurrency(value: Any, source: Source) -> dict[str, Any]:
    """AReaL counts groups, a recipe episodes."""
    groups = value or source("train_dataset.batch_size")
    episodes = int(groups) * int(source("gconfig.n_samples"))
    return {"rollout.max_concurrent_rollouts": episodes}


def _context(value: Any, source: Source) -> dict[str, Any]:
    """The least of the bounds that are given."""
    bounds = [source(key) for key in CONTEXT_KEYS if key in source.given]
    known = [int(bound) for bound in bounds if bound is not None]
    return {"inference.context_tokens": min(known)} if known else {}


def _sampling(name: str) -> tuple[Rule, ...]:
    """A parameter of generation, for training and for evaluation."""
    train, valid = f"rollout.sampling.{name}", f"evaluation.sampling.{name}"

    def convert(value: Any) -> Any:
        return -1 if name == "top_k" and value is not None and value >= ALL_TOKENS else value

    def trained(value: Any, source: Source) -> dict[str, Any]:
        own = source(f"eval_gconfig.{name}")
        return {train: convert(value), valid: convert(value if own is None else own)}

    return (
        computed(f"gconfig.{name}", f"`{train}`; `{valid}` without `eval_gconfig`", trained),
        anyway(f"eval_gconfig.{name}", f"`{valid}`, by `gconfig.{name}`"),
    )


def _evaluate_greedily(value: Any, source: Source) -> dict[str, Any]:
    return {"evaluation.sampling.temperature": 0.0} if value else {}


def _tool_parser(value: Any, source: Source) -> dict[str, Any]:
    return {"inference.tool_call_parser": PARSERS.get(value, value)} if value else {}


def _partial_groups(value: Any, source: Source) -> dict[str, Any]:
    return {} if value else {"rollout.min_samples": 2}


def _generation(section: str) -> tuple[Rule, ...]:
    """What `gconfig` and `eval_gconfig` have in common beside sampling."""
    return (
        always(f"{section}.min_new_tokens", 0, "replies have no least length"),
        lost(f"{section}.stop", "a request names its own `stop`"),
        anyway(f"{section}.stop_token_ids", "replies end where the model's own files say"),
        always(f"{section}.frequency_penalty", 0.0, "a request may ask for it itself"),
        lost(f"{section}.seed", "every episode gets a seed of its own, made from `seed`"),
        anyway(f"{section}.reward_normalization", "rewards are compared within groups"),
    )


def _agent(section: str) -> tuple[Rule, ...]:
    """`rollout.agent`, and `rollout.openai` as it was called."""
    here = "rollout.agent"
    given = section != here
    return (
        renamed(f"{section}.mode", f"{here}.mode", only_if_given=given),
        renamed(f"{section}.turn_discount", f"{here}.turn_discount", only_if_given=given),
        renamed(f"{section}.export_style", f"{here}.export_style", only_if_given=given),
        renamed(
            f"{section}.subproc_max_workers", f"{here}.subproc_max_workers", only_if_given=given
        ),
        renamed(f"{section}.drop_retry_orphans", f"{here}.drop_retry_orphans", only_if_given=given),
        computed(
            f"{section}.tool_call_parser",
            "`inference.tool_call_parser`, under SGLang's name",
            _tool_parser,
            only_if_given=given,
        ),
        lost(
            f"{section}.reasoning_parser",
            "AReaL leaves the reasoning in `content`; `inference.reasoning_parser` would move it "
            "to `reasoning_content`",
        ),
        always(
            f"{section}.chat_template_type",
            "concat",
            "tokens of earlier turns are never tokenised again",
        ),
        computed(
            f"{section}.engine_max_tokens",
            "`inference.context_tokens`: the least of the bounds given",
            _context,
            only_if_given=True,
        ),
        lost(f"{section}.admin_api_key", "every run makes a secret of its own"),
        lost(
            f"{section}.message_preprocessors",
            "write one function for `proxy.message_normaliser`",
        ),
        lost(f"{section}.prefix_matcher", "write a function for `proxy.message_normaliser`"),
        renamed(
            f"{section}.session_timeout_seconds", "proxy.session_timeout_s", only_if_given=given
        ),
        lost(f"{section}.set_reward_finish_timeout", "an episode ends when `run` returns"),
        renamed(f"{section}.agent_cls_path", "rollout.workflow", only_if_given=True),
    )


ARGUMENTS = "sglang.*"
"""The keys that become arguments of SGLang's command line."""
CONTEXT_KEYS = (
    "gconfig.max_tokens",
    "sglang.context_length",
    "rollout.agent.engine_max_tokens",
    "rollout.openai.engine_max_tokens",
)
"""Bounds on prompt plus reply."""

_LEAST = "`inference.context_tokens`: the least of the bounds given"
_RETRIED = "a call waits for a replica until `proxy.request_timeout_s`"

ROLLOUT_RULES = (
    renamed("gconfig.n_samples", "rollout.n_samples"),
    *_sampling("max_new_tokens"),
    *_sampling("temperature"),
    *_sampling("top_p"),
    *_sampling("top_k"),
    computed("gconfig.max_tokens", _LEAST, _context, only_if_given=True),
    always("gconfig.greedy", False, "episodes of a group would be the same"),
    *_generation("gconfig"),
    computed(
        "gconfig.drop_incomplete_group",
        "`rollout.min_samples`: 2 if false",
        _partial_groups,
        only_if_given=True,
    ),
    always("eval_gconfig.n_samples", 1, "a held-out task is played once"),
    computed("eval_gconfig.greedy", "`evaluation.sampling.temperature`: 0", _evaluate_greedily),
    *_generation("eval_gconfig"),
    anyway("eval_gconfig.max_tokens", "`inference.context_tokens` bounds evaluation too"),
    anyway("eval_gconfig.drop_incomplete_group", "a held-out task is played once"),
    computed("rollout.backend", "`inference.cells`, `replicas_per_cell`, `tp`", of_engine),
    same_as("rollout.experiment_name", "experiment_name", "a run has one name"),
    same_as("rollout.trial_name", "trial_name", "a run has one name"),
    same_as("rollout.fileroot", "cluster.fileroot", "a run has one directory"),
    same_as("rollout.tokenizer_path", "tokenizer_path", "the tokenizer is the model's"),
    computed(
        "rollout.max_concurrent_rollouts",
        "`rollout.max_concurrent_rollouts`, times `n_samples`: episodes, not groups",
        _concurrency,
    ),
    lost("rollout.queue_size", "a ticket waits at the ledger, not in a queue"),
    computed(
        "rollout.consumer_batch_size",
        "as `train_dataset.batch_size`",
        lambda value, source: (
            {}
            if value in (1, source("train_dataset.batch_size"))
            else Lost("a batch is trainer.batch_size tickets")
        ),
    ),
    renamed("rollout.max_head_offpolicyness", "rollout.max_head_offpolicyness"),
    anyway("rollout.enable_rollout_tracing", "`events.jsonl` and the shards tell"),
    always("rollout.deterministic_sampling", False, "every episode has a seed of its own"),
    anyway("rollout.check_trajectory_format", "every shard is checked as it is written and read"),
    anyway("rollout.dump_to_file", "every trajectory is in a shard: `areal-hpc shards show`"),
    renamed("rollout.setup_timeout", "inference.startup_timeout_s", only_if_given=True),
    renamed("rollout.request_timeout", "proxy.request_timeout_s", only_if_given=True),
    lost("rollout.request_retries", _RETRIED),
    lost(
        "rollout.pause_grace_period",
        "an update waits for nothing: generations stop and go on under the new weights",
    ),
    lost("rollout.routing_strategy", "a session stays with its replica while that serves"),
    lost("rollout.schedule_policy", "a session stays with its replica while that serves"),
    always("rollout.return_routed_experts", False, "experts are routed anew in training"),
    lost("rollout.scheduling_spec.*", "what a job asks Slurm for is in the section `cluster`"),
    lost("rollout.scheduling_strategy.*", "trainer and replicas have nodes of their own"),
    *_agent("rollout.agent"),
    *_agent("rollout.openai"),
    computed("sglang.context_length", _LEAST, _context, only_if_given=True),
    renamed("sglang.mem_fraction_static", "inference.mem_fraction"),
    renamed("sglang.max_running_requests", "inference.max_running_requests"),
    renamed("sglang.max_total_tokens", "inference.max_total_tokens"),
    renamed("sglang.dtype", "inference.dtype"),
    same_as("sglang.model_path", "actor.path", "what is trained is what is served"),
    anyway("sglang.random_seed", "each replica gets one, made from `seed`"),
    anyway("sglang.skip_tokenizer_init", "the proxy tokenises"),
    anyway("sglang.enable_metrics", "the relay reads what it needs"),
    # Whoever translates collects these: what is made of one key adds to what others made.
    anyway(ARGUMENTS, "`inference.extra_args`: SGLang's own argument of that name"),
    lost("vllm.*", "SGLang serves"),
)
"""What becomes of each."""
