"""Continuation of a reply on another replica after one is lost.

A call that nobody has seen anything of is repeated whole. One whose client has read tokens cannot
be: they would come out otherwise. The other replica is then asked to go on after them. What is
recorded is exactly what was sampled: every token with its log-probability and its version.
"""

import msgspec

from areal_hpc.proxy.engine.generation import (
    NO_PENALTIES,
    Generation,
    count_stop_prefix_chars,
)
from areal_hpc.proxy.engine.router import pack_weight_version
from areal_hpc.proxy.engine.sglang_client import GenerateRequest
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import VersionSpan, format_ids_as_json_inside, join_json_array_insides
from areal_hpc.wire.replicas import ReplicaView


class ReplyFailover:
    """One reply, and what lost replicas have said of it."""

    def __init__(self, encoder: TokenEncoder) -> None:
        self._encoder = encoder
        self._said: Generation | None = None
        self.is_possible = True
        """False once something was said that another replica cannot go on from."""

    def build_next_request(self, request: GenerateRequest) -> GenerateRequest:
        """Build the request for the next replica; it is the same as long as nothing was said."""
        if self._said is None:
            return request
        ids = self._said.output_ids
        left_tokens = request.sampling.max_new_tokens - len(ids)
        return msgspec.structs.replace(
            request,
            prompt_ids_json_inside=join_json_array_insides(
                request.prompt_ids_json_inside, format_ids_as_json_inside(ids)
            ),
            sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left_tokens),
        )

    def on_replica_lost(
        self, partial: Generation | None, replica: ReplicaView, request: GenerateRequest
    ) -> None:
        """A replica, as it was when it was asked, was lost after it had said `partial`.

        That is None if the stream was not sound. A token that came while the replica still had the
        version of when it was asked was sampled from that one: versions only grow.
        """
        if partial is None:
            self.is_possible = False
        elif partial.output_ids:
            known = replica.version and pack_weight_version(replica.version)
            self.keep_aborted_part(partial, request)
            self.is_possible &= partial.spans[0].version == known

    def keep_aborted_part(self, generation: Generation, request: GenerateRequest) -> None:
        """A replica ended the call by itself, and said what came until then.

        Nobody in a run asks for that; the owner of servers behind a standalone proxy may, whose
        `pause_generation` aborts unless told otherwise.
        """
        if not generation.output_ids:
            return
        sampling = request.sampling
        text = self._encoder.decode(
            generation.output_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        # A character of which only a part has come, the beginning of a stop string, the state of
        # a grammar or of penalties: all that would be lost between the two replicas.
        self.is_possible = (
            text == generation.text
            and not count_stop_prefix_chars(text, sampling.stop or ())
            and len(generation.output_ids) < sampling.max_new_tokens
            and not sampling.active_grammar_names
            and sampling.penalties == NO_PENALTIES
            and not sampling.min_new_tokens
        )
        self._said = self.join_replies(generation)

    def join_replies(self, generation: Generation) -> Generation:
        said = self._said
        if said is None:
            return generation
        spans = list(said.spans)
        for span in generation.spans:
            start, end = (len(said.output_ids) + place for place in (span.start, span.end))
            if spans and spans[-1].version == span.version:
                start = spans.pop().start
            spans.append(VersionSpan(span.version, start, end))
        is_kept = bool(said.sampling_mask_ids) and bool(generation.sampling_mask_ids)
        mask_ids = said.sampling_mask_ids + generation.sampling_mask_ids
        mask_logprobs = said.sampling_mask_logprobs + generation.sampling_mask_logprobs
        return msgspec.structs.replace(
            generation,
            sampling_mask_ids=mask_ids if is_kept else [],
            sampling_mask_logprobs=mask_logprobs if is_kept else [],
            text=said.text + generation.text,
            output_ids=said.output_ids + generation.output_ids,
            logprobs=said.logprobs + generation.logprobs,
            spans=spans,
            top_logprobs=said.top_logprobs + generation.top_logprobs,
            cached_tokens=said.cached_tokens,
            # This replica has read again what the other one said.
            routes=said.routes + generation.routes[len(said.routes) :],
        )
