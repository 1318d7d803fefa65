"""Digest of a reply as the engine sampled it, by which a client's record of it is recognized."""

import hashlib
from collections.abc import Sequence

import msgspec

from areal_hpc.session.tree import (
    Interaction,
    InteractionTree,
    VersionSpan,
    format_ids_as_json_inside,
    unpack_ids,
)

DIGEST_BYTES = 16


def compute_reply_digest(
    prompt_ids_json_inside: bytes,
    output_ids: bytes,
    logprobs: bytes,
    spans: Sequence[VersionSpan],
    kept_counts: bytes,
    kept_ids: bytes,
) -> bytes:
    """What identifies a prompt with the tokens sampled after it, packed as in an `Interaction`.

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
    """The same of a sound model call, whose parent is in the tree."""
    parent = None if call.parent_id is None else tree[call.parent_id]
    new_ids_json_inside = format_ids_as_json_inside(unpack_ids(call.new_ids).tolist())
    prompt_json = tree.build_sequence_ids_json_inside(parent, new_ids_json_inside)
    return compute_reply_digest(
        prompt_json,
        *(call.output_ids, call.logprobs, call.spans, call.kept_counts, call.kept_ids),
    )
