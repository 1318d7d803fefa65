"""Records of a row's model calls, made from the interactions of its path."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from areal_hpc.session.tree import Interaction
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.row_record import CallRecord

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
    """The calls of a row, in the order of its tokens, and the tool schemas they name, by hash."""
    contexts = [decode_rendering_context(one.context) for one in path]
    records = [
        _build_call_record(
            one,
            context,
            one.interaction_id in trained_reply_ids,
            followers.get(one.interaction_id, ()),
        )
        for one, context in zip(path, contexts, strict=True)
    ]
    return records, {one.tools_hash: one.tools for one in contexts if one.tools_hash}


def _build_call_record(
    call: Interaction, context: RenderingContext, is_trained: bool, followers: Sequence[str]
) -> CallRecord:
    reward = None  # what a client's agent gave, and the client passed back elsewhere, is none
    if call.reward is not None:
        reward = msgspec.structs.replace(call.given_reward or Reward(0.0), value=call.reward)
    return CallRecord(
        id=call.interaction_id,
        parent_id=call.parent_id,
        followers=list(followers),
        trained=is_trained,
        reward=reward,
        reuse=call.reuse,
        asked_at=call.asked_at,
        first_token_at=call.first_token_at,
        answered_at=call.answered_at,
        replica=call.replica,
        prompt_tokens=call.prompt_tokens,
        reply_tokens=call.num_output_tokens,
        cached_tokens=call.cached_tokens,
        finish_reason=call.finish_reason,
        new_messages=len(call.new_messages),
        tools=context.tools_hash,
        template_variables=context.variables,
        sampling=decode_sampling_params_json(call.sampling),
    )


def decode_sampling_params_json(params_json: bytes) -> dict[str, Any]:
    return _json_object_decoder.decode(params_json) if params_json else {}


@lru_cache(maxsize=256)
def decode_rendering_context(context: bytes) -> RenderingContext:
    """What an interaction's messages were rendered with. Shared: not to be changed."""
    if not context:
        return RenderingContext()
    match msgspec.json.decode(context):
        case [tools, dict() | None as variables]:
            pass
        case _:  # a client in the agent may have recorded it
            return RenderingContext()
    if not tools:
        return RenderingContext(variables=variables or {})
    encoded = msgspec.json.encode(tools, order="sorted")
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return RenderingContext(digest, tools, variables or {})
