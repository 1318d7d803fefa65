"""`/generate` passthrough for clients that record their own calls."""

import time

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.call_limits import (
    ConcurrentReplyLimiter,
    refuse_call_beyond_limits,
    reserve_reply_tokens_per_choice,
)
from areal_hpc.proxy.engine.generation import (
    Generation,
    UnfinishedEngineCallError,
    decode_generation,
)
from areal_hpc.proxy.engine.grammar_limits import GrammarChecks
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.proxy.sessions.events import ReplySampled
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.call_records import compute_reply_digest
from areal_hpc.session.tree import pack_ids


class GeneratePassthrough:
    def __init__(
        self,
        recorder: JournaledRecorder,
        router: Router,
        upstream: SGLangClient,
        limiter: ConcurrentReplyLimiter,
        grammars: GrammarChecks,
        timeout_s: float,
    ) -> None:
        self._recorder = recorder
        self._router = router
        self._upstream = upstream
        self._limiter = limiter
        self._grammars = grammars
        self._timeout_s = timeout_s

    async def generate(self, session: Session, request: GenerateRequest) -> bytes:
        give_up_at = time.monotonic() + self._timeout_s
        with self._limiter.hold_slots(session, 1):
            refuse_call_beyond_limits(session, 1)
            await self._grammars.refuse_costly_grammar(session, request.sampling)
            sampling, reserved_tokens = await reserve_reply_tokens_per_choice(
                session, request.sampling, 1, give_up_at
            )
            request = msgspec.structs.replace(request, sampling=sampling)
            try:
                answer = await self._send_once(session, request, give_up_at)
            finally:
                session.reserved_tokens -= reserved_tokens
        try:
            reply = decode_generation("a replica", answer)
        except (UnfinishedEngineCallError, ProxyRequestError):
            return answer  # the client reads the same in it, and has nothing to record
        self._record_sampled_reply(session, request, reply)
        return answer

    async def _send_once(
        self, session: Session, request: GenerateRequest, give_up_at: float
    ) -> bytes:
        replica = await self._router.pick_replica(session, give_up_at)
        left_s = max(1.0, give_up_at - time.monotonic())
        self._router.on_call_started(replica)
        try:
            return await self._upstream.generate_raw(replica, request, left_s)
        except UnfinishedEngineCallError as lost:
            self._router.on_call_lost(replica, lost)
            raise ProxyRequestError(502, f"the replica was lost: {lost}") from lost
        finally:
            self._router.on_call_finished(session, replica)

    def _record_sampled_reply(
        self, session: Session, request: GenerateRequest, reply: Generation
    ) -> None:
        for span in reply.spans:
            self._router.advance_newest_version(span.version)
        digest = compute_reply_digest(
            request.prompt_ids_json_inside,
            pack_ids(reply.output_ids),
            reply.pack_behavior_logprobs(),
            reply.spans,
            *reply.pack_sampling_mask(),
        )
        if self._recorder.holds_session(session):
            sampled = ReplySampled(session.session_id, digest, len(reply.output_ids))
            self._recorder.journal_and_apply(sampled)
