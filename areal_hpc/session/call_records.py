"""Records of the model calls of a row, and checks of a call before it enters its session.

A call that a client recorded by itself reaches the proxy as plain data. A session with a call whose
lengths disagree cannot become rows; an id outside the vocabulary, or a log-probability that is not
finite, makes a row that stops every trainer that reads it.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from areal_hpc.session.tree import (
    Interaction,
    InteractionTree,
    VersionSpan,
    format_ids_as_json_inside,
    sort_json_keys,
    unpack_ids,
)
from areal_hpc.wire.agent_reward import MAX_REWARD, Reward
from areal_hpc.wire.decoding import convert_value
from areal_hpc.wire.trajectory import (
    MAX_TEMPERATURE,
    MAX_VOCAB_SIZE,
    CallFacts,
    CallRecord,
    SamplingMask,
    find_mask_defect,
)

_json_object_decoder = msgspec.json.Decoder(dict[str, Any])


class RenderingContext(msgspec.Struct, frozen=True):
    """Tools and template variables that messages were rendered with."""

    tools_hash: str = ""
    tools: Any = None
    variables: dict[str, Any] = {}


def build_call_records(
    path: Sequence[Interaction],
    trained_reply_ids: Collection[str],
    followers: Mapping[str, Sequence[str]],
) -> tuple[list[CallRecord], dict[str, Any]]:
    """Return the records of a row's calls in the order of its tokens, and tool schemas by hash."""
    records, schemas = [], dict[str, Any]()
    for call in path:
        context = decode_rendering_context(call.context)
        if context.tools_hash:
            schemas[context.tools_hash] = context.tools
        reward = None
        if call.reward is not None:  # a client that passes rewards back may have removed it
            reward = msgspec.structs.replace(call.given_reward or Reward(0.0), value=call.reward)
        records.append(
            CallRecord(
                id=call.interaction_id,
                parent_id=call.parent_id,
                followers=[*followers.get(call.interaction_id, ())],
                trained=call.interaction_id in trained_reply_ids,
                reward=reward,
                reuse=call.reuse,
                prompt_tokens=call.prompt_tokens,
                reply_tokens=call.num_output_tokens,
                finish_reason=call.finish_reason,
                new_messages=len(call.new_messages),
                tools=context.tools_hash,
                template_variables=context.variables,
                sampling=decode_sampling_params_json(call.sampling),
                **{name: getattr(call, name) for name in CallFacts.__struct_fields__},
            )
        )
    return records, schemas


def decode_sampling_params_json(params_json: bytes) -> dict[str, Any]:
    return _json_object_decoder.decode(params_json) if params_json else {}


@lru_cache(maxsize=256)
def decode_rendering_context(context: bytes) -> RenderingContext:
    """Decode an interaction's context. Callers share the result and must not change it."""
    if not context:
        return RenderingContext()
    match msgspec.json.decode(context):
        case [tools, dict() | None as variables]:
            pass
        case _:  # a client in the agent may record any JSON
            return RenderingContext()
    if not tools:
        return RenderingContext(variables=variables or {})
    encoded = msgspec.json.encode(tools, order="sorted")
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return RenderingContext(digest, tools, variables or {})


MAX_PACKED_VERSION = 2**63 - 1
"""Limit of packed weight versions, which are stored as 64-bit integers."""
MAX_INTERACTION_ID_CHARS = 256


class _ToolCall(msgspec.Struct):
    function: Any


class _ComparableMessage(msgspec.Struct):
    role: str
    reasoning_content: str | None = None


class _ComparableToolCallMessage(msgspec.Struct):
    tool_calls: list[_ToolCall]
    content: str | None = None


class _TruncationSamplingParameters(msgspec.Struct):
    top_p: float = 1.0
    top_k: float = -1
    min_p: float = 0.0


def find_interaction_defect(
    call: Interaction, tree: InteractionTree, vocab_size: int = MAX_VOCAB_SIZE
) -> str | None:
    """Return the first defect that keeps a model call out of its session; None for a sound call.

    The tree holds the session's earlier calls; ids below `vocab_size` have an embedding.
    """
    if not 0 < len(call.interaction_id) <= MAX_INTERACTION_ID_CHARS:
        allowed = f"expected an id of 1 to {MAX_INTERACTION_ID_CHARS} characters"
        return f"{allowed}, got {len(call.interaction_id)}"
    return (
        _find_token_defect(call, tree, vocab_size)
        or _find_version_defect(call.spans, call.num_output_tokens)
        or _find_scalar_defect(call)
        or _find_message_defect(call)
    )


def find_client_reported_field_defect(call: Interaction) -> str | None:
    """Return the first defect of fields that only a client's record can have; None if sound."""
    try:
        sampling = decode_sampling_params_json(call.sampling)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"expected sampling parameters as a JSON object: {error}"
    try:
        convert_value(sampling, _TruncationSamplingParameters)
    except msgspec.ValidationError as error:
        return f"expected sampling parameters that are numbers: {error}"
    if not -1 <= call.replica < 2**31:
        return f"expected a replica from -1 to 2**31 - 1, got {call.replica}"
    if not 0 <= call.cached_tokens < 2**31:
        return f"expected cached tokens from 0 to 2**31 - 1, got {call.cached_tokens}"
    if call.routes is not None:
        return "expected no routes, because /generate returns none to clients"
    if not math.isfinite(call.first_token_at):
        return "expected finite times, got inf or nan"
    return None


def _find_token_defect(call: Interaction, tree: InteractionTree, vocab_size: int) -> str | None:
    new_bytes, reply_bytes, logprob_bytes = map(len, (call.new_ids, call.output_ids, call.logprobs))
    if new_bytes % 4 or reply_bytes % 4 or logprob_bytes % 4:
        sizes_bytes = (new_bytes, reply_bytes, logprob_bytes)
        return f"expected token arrays of 4 bytes a token, got {sizes_bytes} bytes"
    if logprob_bytes != reply_bytes:
        return (
            f"expected a log-probability for each of {call.num_output_tokens} sampled tokens, "
            f"got {logprob_bytes // 4}"
        )
    if call.parent_id is not None and call.parent_id not in tree:
        return f"the call that it continues, {call.parent_id!r:.300}, is not in the session"
    prior_tokens = 0 if call.parent_id is None else tree[call.parent_id].num_sequence_tokens
    prompt_tokens = prior_tokens + new_bytes // 4
    if call.prompt_tokens != prompt_tokens or prompt_tokens < 1:
        return f"expected a prompt of {max(prompt_tokens, 1)} tokens, got {call.prompt_tokens}"
    ids = call.new_ids + call.output_ids
    # As unsigned numbers, negative ids are the largest: one comparison finds both.
    if ids and np.maximum.reduce(np.frombuffer(ids, "<u4")) >= vocab_size:
        ids_T = unpack_ids(ids)
        outlier = int(ids_T.min()) if int(ids_T.min()) < 0 else int(ids_T.max())
        return f"expected token ids from 0 to {vocab_size - 1}, got {outlier}"
    if call.kept_counts or call.kept_ids:
        if len(call.kept_counts) % 2 or len(call.kept_ids) % 4:
            return "expected a sampling mask of 2 bytes a place and 4 bytes a token"
        counts_T = np.frombuffer(call.kept_counts, "<u2")
        mask = SamplingMask(counts_T, unpack_ids(call.kept_ids))
        if defect := find_mask_defect(mask, unpack_ids(call.output_ids), vocab_size):
            return defect
    # One number that is not finite makes the sum so; a sum of 64-bit numbers cannot overflow.
    if not math.isfinite(sum(memoryview(call.logprobs).cast("f"))):
        return "expected finite log-probabilities, got inf or nan"
    return None


def _find_version_defect(spans: list[VersionSpan], output_tokens: int) -> str | None:
    covered = 0
    for span in spans:
        if span.start != covered or span.end < span.start:
            tokens = f"one for {span.start} to {span.end}"
            return f"expected a weight version from sampled token {covered} on, got {tokens}"
        if not 0 <= span.version <= MAX_PACKED_VERSION:
            return f"expected a packed weight version from 0 to 2**63 - 1, got {span.version}"
        covered = span.end
    if covered != output_tokens:
        return f"expected weight versions for {output_tokens} sampled tokens, got {covered}"
    return None


def _find_scalar_defect(call: Interaction) -> str | None:
    if not 0 <= call.temperature <= MAX_TEMPERATURE:
        return f"expected a temperature from 0 to {MAX_TEMPERATURE:g}, got {call.temperature}"
    if call.reward is not None and not abs(call.reward) <= MAX_REWARD:
        return f"expected a finite 32-bit float as reward, got {call.reward}"
    if not (math.isfinite(call.asked_at) and math.isfinite(call.answered_at)):
        return "expected finite times, got inf or nan"
    return None


def _find_message_defect(call: Interaction) -> str | None:
    for message in (*call.new_messages, call.reply):
        try:
            convert_value(message, _ComparableMessage)
            if message.get("tool_calls"):
                convert_value(message, _ComparableToolCallMessage)
        except (msgspec.ValidationError, RecursionError) as error:
            return f"expected messages in normal form, got {message!r:.200} ({error})"
    try:
        sort_json_keys(call.context)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "expected JSON as the context of the messages"
    return None


DIGEST_BYTES = 16


def compute_reply_digest(
    prompt_ids_json_inside: bytes,
    output_ids: bytes,
    logprobs: bytes,
    spans: Sequence[VersionSpan],
    kept_counts: bytes,
    kept_ids: bytes,
) -> bytes:
    """Return the digest of a prompt and the tokens sampled after it, packed as in `Interaction`.

    `prompt_ids_json_inside` is the inside of a JSON array of the prompt's ids.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    encoded_spans = msgspec.json.encode(spans)
    parts = [prompt_ids_json_inside, output_ids, logprobs, encoded_spans, kept_counts, kept_ids]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def compute_reply_digest_of_call(call: Interaction, tree: InteractionTree) -> bytes:
    """Return the reply digest of a sound model call, whose parent is in the tree."""
    parent = None if call.parent_id is None else tree[call.parent_id]
    new_ids_json_inside = format_ids_as_json_inside(unpack_ids(call.new_ids).tolist())
    prompt_json = tree.build_sequence_ids_json_inside(parent, new_ids_json_inside)
    return compute_reply_digest(
        prompt_json,
        *(call.output_ids, call.logprobs, call.spans, call.kept_counts, call.kept_ids),
    )
