"""Translation rules for AReaL's `rollout`, `gconfig` and `sglang` keys."""

from typing import Any

from areal_hpc.areal.config.allocation_mode import parse_engine_backend
from areal_hpc.areal.config.rules import (
    ArealConfigValues,
    KeyRule,
    Untranslatable,
    fixed_value_rule,
    ignored_rule,
    renamed_rule,
    repeated_run_key_rules,
    same_as_key_rule,
    unsupported_rule,
    unsupported_scheduling_rules,
)
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION

NO_TOP_K = 100_000_000
"""AReaL's `top_k` for no bound."""
TOOL_PARSER_BY_AREAL_NAME = {"qwen": "qwen25"}
"""AReaL's names of SGLang's parsers, where they differ."""
_NEUTRAL_SAMPLING_VALUES = {"top_p": 1.0, "top_k": -1}
_CONTEXT_LENGTH_NOTE = "`inference.context_length`: the least of the bounds given"


def _convert_groups_to_episodes(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    groups = value or areal_values("train_dataset.batch_size")
    episodes = int(groups) * int(areal_values("gconfig.n_samples"))
    return {"rollout.max_concurrent_rollouts": episodes}


def _choose_least_context_length(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    bounds = [areal_values(key) for key in CONTEXT_LENGTH_KEYS if key in areal_values.given]
    known = [int(bound) for bound in bounds if bound is not None]
    return {"inference.context_length": min(known)} if known else {}


def _build_sampling_param_rules(param_name: str) -> tuple[KeyRule, ...]:
    train, valid = f"rollout.sampling.{param_name}", f"evaluation.sampling.{param_name}"

    def convert(value: Any) -> Any:
        return -1 if param_name == "top_k" and value is not None and value >= NO_TOP_K else value

    def translate(value: Any, areal_values: ArealConfigValues) -> dict[str, Any] | Untranslatable:
        own = areal_values(f"eval_gconfig.{param_name}")
        found = {train: convert(value), valid: convert(value if own is None else own)}
        if param_name == "top_k" and found[train] > MAX_MASK_TOKENS_PER_POSITION:
            return Untranslatable(
                f"at most {MAX_MASK_TOKENS_PER_POSITION}, or no bound; set {valid}"
            )
        if (
            param_name in _NEUTRAL_SAMPLING_VALUES
            and found[train] != _NEUTRAL_SAMPLING_VALUES[param_name]
        ):
            found["rollout.record_sampling_mask"] = True  # trained as it was sampled
        return found

    return (
        KeyRule(f"gconfig.{param_name}", f"`{train}`; `{valid}` without `eval_gconfig`", translate),
        ignored_rule(f"eval_gconfig.{param_name}", f"`{valid}`, by `gconfig.{param_name}`"),
    )


def _translate_greedy_evaluation(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    return {"evaluation.sampling.temperature": 0.0} if value else {}


def _translate_tool_parser(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    if not value:
        return {}
    # A strict tool, which frameworks offer unasked, is sampled under a grammar, and trained so.
    parser = TOOL_PARSER_BY_AREAL_NAME.get(value, value)
    return {"inference.tool_call_parser": parser, "rollout.record_sampling_mask": True}


def _translate_partial_groups(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    return {} if value else {"rollout.min_samples": 2}


def _non_sampling_generation_rules(section: str) -> tuple[KeyRule, ...]:
    return (
        fixed_value_rule(
            f"{section}.min_new_tokens", 0, "the agent asks for `min_tokens` in its calls"
        ),
        unsupported_rule(f"{section}.stop", "a request names its own `stop`"),
        ignored_rule(f"{section}.stop_token_ids", "replies end where the model's own files say"),
        fixed_value_rule(f"{section}.frequency_penalty", 0.0, "a request may ask for it itself"),
        unsupported_rule(
            f"{section}.seed", "every episode gets a seed of its own, made from `seed`"
        ),
        ignored_rule(f"{section}.reward_normalization", "rewards are compared within groups"),
    )


def _translate_turn_discount(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    if value == 1:
        return {}
    return {"trainer.objective.credit": "turn", "trainer.objective.turn_discount": value}


def _agent_rules(section: str) -> tuple[KeyRule, ...]:
    here = "rollout.agent"
    given = section != here
    kept = ("mode", "export_style", "subproc_max_workers", "drop_retry_orphans")
    return (
        KeyRule(
            f"{section}.turn_discount",
            "`trainer.objective.turn_discount`, with `credit=turn` where it is below 1",
            _translate_turn_discount,
            only_if_given=given,
        ),
        *(
            renamed_rule(f"{section}.{name}", f"{here}.{name}", only_if_given=given)
            for name in kept
        ),
        KeyRule(
            f"{section}.tool_call_parser",
            "`inference.tool_call_parser`, under SGLang's name; `rollout.record_sampling_mask`",
            _translate_tool_parser,
            only_if_given=given,
        ),
        unsupported_rule(
            f"{section}.reasoning_parser",
            "AReaL leaves the reasoning in `content`; `inference.reasoning_parser` would move it "
            "to `reasoning_content`",
        ),
        fixed_value_rule(
            f"{section}.chat_template_type",
            "concat",
            "tokens of earlier turns are never tokenized again",
        ),
        KeyRule(
            f"{section}.engine_max_tokens",
            _CONTEXT_LENGTH_NOTE,
            _choose_least_context_length,
            only_if_given=True,
        ),
        unsupported_rule(f"{section}.admin_api_key", "every run makes a secret of its own"),
        unsupported_rule(
            f"{section}.message_preprocessors",
            "write one function for `proxy.message_normalizer`",
        ),
        unsupported_rule(
            f"{section}.prefix_matcher", "write a function for `proxy.message_normalizer`"
        ),
        renamed_rule(
            f"{section}.session_timeout_seconds", "proxy.session_timeout_s", only_if_given=given
        ),
        unsupported_rule(
            f"{section}.set_reward_finish_timeout", "an episode ends when `run` returns"
        ),
        renamed_rule(f"{section}.agent_cls_path", "rollout.workflow", only_if_given=True),
    )


SGLANG_KEY_PATTERN = "sglang.*"
"""The keys that become arguments of SGLang's command line."""
CONTEXT_LENGTH_KEYS = (
    "gconfig.max_tokens",
    "sglang.context_length",
    "rollout.agent.engine_max_tokens",
    "rollout.openai.engine_max_tokens",
)
"""Bounds on prompt plus reply."""

ROLLOUT_RULES = (
    renamed_rule("gconfig.n_samples", "rollout.n_samples"),
    *_build_sampling_param_rules("max_new_tokens"),
    *_build_sampling_param_rules("temperature"),
    *_build_sampling_param_rules("top_p"),
    *_build_sampling_param_rules("top_k"),
    KeyRule(
        "gconfig.max_tokens", _CONTEXT_LENGTH_NOTE, _choose_least_context_length, only_if_given=True
    ),
    fixed_value_rule("gconfig.greedy", False, "episodes of a group would be the same"),
    *_non_sampling_generation_rules("gconfig"),
    KeyRule(
        "gconfig.drop_incomplete_group",
        "`rollout.min_samples`: 2 if false",
        _translate_partial_groups,
        only_if_given=True,
    ),
    renamed_rule("eval_gconfig.n_samples", "evaluation.n_samples", only_if_given=True),
    KeyRule(
        "eval_gconfig.greedy", "`evaluation.sampling.temperature`: 0", _translate_greedy_evaluation
    ),
    *_non_sampling_generation_rules("eval_gconfig"),
    ignored_rule("eval_gconfig.max_tokens", "`inference.context_length` bounds evaluation too"),
    ignored_rule(
        "eval_gconfig.drop_incomplete_group", "a held-out episode that keeps failing earns 0"
    ),
    KeyRule(
        "rollout.backend", "`inference.cells`, `replicas_per_cell`, `tp`", parse_engine_backend
    ),
    *repeated_run_key_rules("rollout"),
    same_as_key_rule("rollout.tokenizer_path", "tokenizer_path", "the tokenizer is the model's"),
    KeyRule(
        "rollout.max_concurrent_rollouts",
        "`rollout.max_concurrent_rollouts`, times `n_samples`: episodes, not groups",
        _convert_groups_to_episodes,
    ),
    unsupported_rule("rollout.queue_size", "a ticket waits at the ledger, not in a queue"),
    KeyRule(
        "rollout.consumer_batch_size",
        "as `train_dataset.batch_size`",
        lambda value, areal_values: (
            {}
            if value in (1, areal_values("train_dataset.batch_size"))
            else Untranslatable("a batch is trainer.batch_size tickets")
        ),
    ),
    renamed_rule("rollout.max_head_offpolicyness", "rollout.max_head_offpolicyness"),
    ignored_rule("rollout.enable_rollout_tracing", "`events.jsonl` and the shards tell"),
    fixed_value_rule(
        "rollout.deterministic_sampling", False, "every episode has a seed of its own"
    ),
    ignored_rule(
        "rollout.check_trajectory_format", "every shard is checked as it is written and read"
    ),
    ignored_rule("rollout.dump_to_file", "every trajectory is in a shard: `areal-hpc shards show`"),
    renamed_rule("rollout.setup_timeout", "inference.startup_timeout_s", only_if_given=True),
    renamed_rule("rollout.request_timeout", "proxy.request_timeout_s", only_if_given=True),
    unsupported_rule(
        "rollout.request_retries", "a call waits for a replica until `proxy.request_timeout_s`"
    ),
    unsupported_rule(
        "rollout.pause_grace_period",
        "an update never waits: generation pauses and continues with the new weights",
    ),
    unsupported_rule(
        "rollout.routing_strategy", "sessions are sticky to a replica while it serves"
    ),
    unsupported_rule("rollout.schedule_policy", "sessions are sticky to a replica while it serves"),
    fixed_value_rule("rollout.return_routed_experts", False, "experts are routed anew in training"),
    *unsupported_scheduling_rules("rollout"),
    *_agent_rules("rollout.agent"),
    *_agent_rules("rollout.openai"),
    KeyRule(
        "sglang.context_length",
        _CONTEXT_LENGTH_NOTE,
        _choose_least_context_length,
        only_if_given=True,
    ),
    renamed_rule("sglang.mem_fraction_static", "inference.mem_fraction_static"),
    renamed_rule("sglang.max_running_requests", "inference.max_running_requests"),
    renamed_rule("sglang.max_total_tokens", "inference.max_total_tokens"),
    renamed_rule("sglang.dtype", "inference.dtype"),
    same_as_key_rule(
        "sglang.model_path", "actor.path", "the served model is always the trained model"
    ),
    ignored_rule("sglang.random_seed", "each replica gets one, made from `seed`"),
    ignored_rule("sglang.skip_tokenizer_init", "the proxy tokenizes"),
    ignored_rule("sglang.enable_metrics", "the control proxy reads the metrics that it needs"),
    # Whoever translates collects these: what is made of one key adds to what others made.
    ignored_rule(SGLANG_KEY_PATTERN, "`inference.extra_args`: SGLang's own argument of that name"),
    unsupported_rule("vllm.*", "SGLang serves"),
)
"""What becomes of each."""
