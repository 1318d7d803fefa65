"""Continuation of a reply on another replica after one is lost.

A call that nobody has seen anything of is repeated whole. One whose client has read tokens cannot
be: they would come out otherwise. The other replica is then asked to go on after them. What is
recorded is exactly what was sampled: every token with its log-probability and its version.
"""

from __future__ import annotations

import msgspec

from areal_hpc.proxy.engine.generation import (
    Generation,
    PartialGeneration,
    SamplingParams,
    count_stop_prefix_chars,
)
from areal_hpc.proxy.engine.sglang_client import GenerateRequest
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import VersionSpan, encode_ids, join_ids_json
from areal_hpc.wire.replicas import ReplicaView


class ReplyFailover:
    """One reply, and what lost replicas have said of it."""

    def __init__(self, encoder: TokenEncoder) -> None:
        self._encoder = encoder
        self._said: Generation | None = None
        self.is_possible = True
        """False once something was said that another replica cannot go on from."""

    @property
    def has_begun(self) -> bool:
        """A lost replica has said something."""
        return self._said is not None

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """What to ask the next replica."""
        if self._said is None:
            return request
        ids = self._said.output_ids
        left_tokens = request.sampling.max_new_tokens - len(ids)
        return msgspec.structs.replace(
            request,
            prompt_json=join_ids_json(request.prompt_json, encode_ids(ids)),
            sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left_tokens),
        )

    def on_lost(
        self, partial: PartialGeneration | None, replica: ReplicaView, request: GenerateRequest
    ) -> None:
        """A replica was lost after it had said `partial`.

        Of a stream that was cut, the end is missing, and with it the spans of versions. But a
        token that came while the replica still had the version of when it was asked was sampled
        from that one: versions only grow.

        Args:
            partial: None if the stream was not sound.
            replica: As it was when it was asked.
            request: What it was asked.
        """
        if partial is not None and not partial.output_ids:
            return
        if partial is None or partial.versions != {replica.version}:
            self.is_possible = False
            return
        self._take(partial.generation(replica.url, replica.version), request)

    def on_aborted(self, generation: Generation, request: GenerateRequest) -> None:
        """A replica ended the call by itself, and said what came until then."""
        if generation.output_ids:
            self._take(generation, request)

    def _take(self, generation: Generation, request: GenerateRequest) -> None:
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
            and not sampling.grammars
            and not _has_penalties(sampling)
        )
        self._said = self.whole(generation)

    def whole(self, generation: Generation) -> Generation:
        """All that was said, when the last replica has said the rest."""
        said = self._said
        if said is None:
            return generation
        return msgspec.structs.replace(
            generation,
            text=said.text + generation.text,
            output_ids=said.output_ids + generation.output_ids,
            logprobs=said.logprobs + generation.logprobs,
            spans=_joined(said.spans, generation.spans, len(said.output_ids)),
            top_logprobs=said.top_logprobs + generation.top_logprobs,
            cached_tokens=said.cached_tokens,
        )


def _joined(before: list[VersionSpan], after: list[VersionSpan], shift: int) -> list[VersionSpan]:
    spans = list(before)
    for span in after:
        start, end = span.start + shift, span.end + shift
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(span.version, start, end))
    return spans


def _has_penalties(sampling: SamplingParams) -> bool:
    none = (0.0, 0.0, 1.0)
    penalties = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty,
    )
    return penalties != none
