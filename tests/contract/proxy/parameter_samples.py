"""A value of every parameter of every dialect, and requests that give it."""

from collections.abc import Mapping
from typing import Any

from tests.contract.proxy.talk import LEAST, QUESTION

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
"""A function as Responses have it."""
CHAT_ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
"""The same as Messages have it."""
SUM = {**QUESTION[0], "content": "What is 3 + 4?"}
BEGUN = [SUM, {"role": "assistant", "content": "It is"}]

_SHARED: dict[str, Any] = {
    "ebnf": 'root ::= "a"',
    "frequency_penalty": 0.5,
    "guided_choice": ["yes", 'a "no"'],
    "guided_grammar": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_regex": "[0-9]+",
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "max_tokens": 5,
    "min_p": 0.1,
    "min_tokens": 2,
    "model": "gpt-5",
    "n": 2,
    "presence_penalty": 0.5,
    "regex": "[0-9]+",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "seed": 7,
    "stop": ["a"],
    "stop_token_ids": [5],
    "stream": False,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"json": SCHEMA},
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
}
USED: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        **_SHARED,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": False,
        "enable_thinking": False,
        "function_call": "none",
        "functions": [{"name": "add", "parameters": {"type": "object"}}],
        "logprobs": True,
        "max_completion_tokens": 5,
        "messages": QUESTION,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "enabled": True},
        "reasoning_effort": "xhigh",
        "thinking": {"type": "disabled"},
        "tool_choice": "none",
        "tools": [CHAT_ADD],
        "top_logprobs": 2,
    },
    "/completions": {**_SHARED, "best_of": 1, "logprobs": 2, "prompt": "hi"},
    "/messages": {
        "max_tokens": 5,
        "messages": BEGUN,
        "model": "claude",
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
        "stop_sequences": ["a"],
        "stream": False,
        "system": [{"type": "text", "text": "Be brief."}],
        "temperature": 0.5,
        "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "none"},
        "tools": [TOOL],
        "top_k": 5,
        "top_p": 0.5,
    },
    "/responses": {
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "input": QUESTION,
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "model": "gpt-5",
        "parallel_tool_calls": False,
        "previous_response_id": "",
        "reasoning": {"effort": "low"},
        "store": False,
        "stream": False,
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "none",
        "tools": [ADD],
        "top_logprobs": 2,
        "top_p": 0.5,
        "user": "u",
    },
}
HINTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "7"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "user": "u",
        "verbosity": "high",
    },
    "/completions": {"user": "u"},
    "/messages": {
        "betas": ["b-2026-01-01"],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "inference_geo": "eu",
        "metadata": {"user_id": "u"},
        "service_tier": "batch",
        "speed": "fast",
        "tools[].cache_control": {"type": "ephemeral"},
        "tools[].defer_loading": True,
        "tools[].eager_input_streaming": True,
    },
    "/responses": {
        "client_metadata": {"a": "b"},
        "context_management": [{"type": "compaction"}],
        "max_tool_calls": 2,
        "moderation": {"model": "m"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning.generate_summary": "concise",
        "reasoning.summary": "detailed",
        "safety_identifier": "s",
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": True},
        "text.verbosity": "high",
        "tools[].defer_loading": True,
        "truncation": "auto",
    },
}
WISHES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "enable_thinking": False,
        "reasoning.effort": "low",
        "reasoning.enabled": True,
        "reasoning_effort": "xhigh",
        "stream_options": {"include_usage": True},
        "thinking": {"type": "new"},
        "tools[web_search_2030]": {"type": "web_search_2030"},
    },
    "/completions": {"stream_options": {"include_usage": True}},
    "/messages": {
        "output_config.effort": "max",
        "thinking": {"type": "new"},
        "thinking.display": "omitted",
        "tools[web_fetch_20300101]": {"type": "web_fetch_20300101", "name": "web_fetch"},
    },
    "/responses": {
        "include": ["reasoning.encrypted_content"],
        "reasoning.effort": "low",
        "tools[image_generation]": {"type": "image_generation"},
        "tools[tool_search]": {"type": "tool_search", "execution": "client"},
        "tools[web_search]": {"type": "web_search", "external_web_access": False},
        "tools[web_search_preview_2025_03_11]": {"type": "web_search_preview_2025_03_11"},
    },
}
"""What has an effect elsewhere, and none with a template that reads nothing and without servers."""
REFUSED_EVERYWHERE: dict[str, Any] = {
    "adapter": "a",
    "allowed_token_ids": [5],
    "bad_words": ["a"],
    "bad_words_ids": [[5]],
    "custom_logit_processor": "p",
    "do_sample": False,
    "dry_multiplier": 0.8,
    "early_stopping": True,
    "grammar": "g",
    "include_stop_str_in_output": True,
    "json_schema": SCHEMA,
    "length_penalty": 0.5,
    "logits_processors": ["p"],
    "lora_path": "p",
    "min_new_tokens": 3,
    "mirostat": 2,
    "no_repeat_ngram_size": 3,
    "no_stop_trim": True,
    "num_beams": 4,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_regex": "a",
    "structural_tag": {"type": "structural_tag"},
    "tfs_z": 0.9,
    "top_a": 0.5,
    "truncate_prompt_tokens": 9,
    "typical_p": 0.9,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "xtc_probability": 0.5,
}
_OTHERS_OF_CHAT: dict[str, Any] = {
    "best_of": 2,
    "guided_choice": ["a"],
    "guided_grammar": "g",
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "min_tokens": 2,
    "n": 2,
    "response_format": {"type": "json_object"},
    "seed": 1,
    "stop": ["a"],
    "structured_outputs": {"regex": "a"},
    "function_call": {"name": "add"},
    "functions": [{"name": "add"}],
    "prompt": "hi",
}
REFUSED: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        **REFUSED_EVERYWHERE,
        "add_special_tokens": True,
        "audio": {"voice": "v"},
        "background": True,
        "best_of": 2,
        "documents": [{"text": "t"}],
        "echo": True,
        "input": "hi",
        "mcp_servers": [{"url": "u"}],
        "prompt": "hi",
        "suffix": "s",
        "system": "s",
        "web_search_options": {"user_location": "x"},
    },
    "/completions": {
        **REFUSED_EVERYWHERE,
        "add_special_tokens": False,
        "background": True,
        "echo": True,
        "function_call": {"name": "add"},
        "functions": [{"name": "add"}],
        "input": "hi",
        "messages": QUESTION,
        "suffix": "s",
        "system": "s",
        "tools": [CHAT_ADD],
    },
    "/messages": {
        **REFUSED_EVERYWHERE,
        **_OTHERS_OF_CHAT,
        "container": "c",
        "input": "hi",
        "mcp_servers": [{"type": "url", "name": "m", "url": "http://m"}],
    },
    "/responses": {
        **REFUSED_EVERYWHERE,
        **_OTHERS_OF_CHAT,
        "background": True,
        "conversation": "c",
        "messages": QUESTION,
        "system": "s",
    },
}


def body_with(route: str, name: str, value: Any) -> dict[str, Any]:
    """A request that gives one parameter more, wherever that stands."""
    outer, _, inner = name.partition(".")
    if not outer.startswith("tools["):
        beside = _BESIDE.get((route, outer), {})
        return {**LEAST[route], **beside, outer: {inner: value} if inner else value}
    tool = {"/messages": TOOL, "/responses": ADD}.get(route, CHAT_ADD)
    tools = [{**tool, inner: value}] if inner else [tool, value]
    return {**LEAST[route], **with_tool(route, *tools)}


def with_tool(route: str, *tools: Mapping[str, Any]) -> dict[str, Any]:
    """Tools that are not for this model, which has no tool-call parser."""
    return {"tools": tools, "tool_choice": {"type": "none"} if route == "/messages" else "none"}


_BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/chat/completions", "tools"): {"tool_choice": "none"},
    ("/chat/completions", "functions"): {"function_call": "none"},
    ("/chat/completions", "stream_options"): {},
    ("/responses", "top_logprobs"): {"include": ["message.output_text.logprobs"]},
    ("/responses", "tools"): {"tool_choice": "none"},
    ("/messages", "tools"): {"tool_choice": {"type": "none"}},
}
"""What else a request must have for a parameter to mean something."""
