"""`/generate` passthrough for clients that record their own calls."""

import contextlib
import time

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.call_quota import CallQuota
from areal_hpc.proxy.engine.generation import EngineLostError
from areal_hpc.proxy.engine.grammar_limits import GrammarQuota
from areal_hpc.proxy.engine.router import Router, pack_weight_version
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.proxy.sessions.store import Session


class _VersionSpan(msgspec.Struct):
    version: str = ""


class _MetaInfo(msgspec.Struct):
    weight_versions: list[_VersionSpan] = []


class _Answer(msgspec.Struct):
    """Fields of an answer, as far as the proxy reads them: which weights sampled it."""

    meta_info: _MetaInfo


class GeneratePassthrough:
    """Sends requests of sessions to the replica that each session sticks to."""

    def __init__(
        self,
        router: Router,
        upstream: SGLangClient,
        quota: CallQuota,
        grammars: GrammarQuota,
        timeout_s: float,
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._quota = quota
        self._grammars = grammars
        self._timeout_s = timeout_s

    async def generate(self, session: Session, request: GenerateRequest) -> bytes:
        """The replica's answer.

        Raises:
            ProxyRequestError: The replica refuses the request; (429) there are too many; or
                (502) it was lost, and another will answer when the request is repeated.
        """
        grammar = self._grammars.hold_slot(session, request.sampling)
        with self._quota.hold_slots(session, 1), grammar:
            give_up_at = time.monotonic() + self._timeout_s
            replica = await self._router.pick_replica(session, give_up_at)
            left_s = max(1.0, give_up_at - time.monotonic())
            self._router.on_call_started(replica)
            try:
                answer = await self._upstream.generate_raw(replica, request, left_s)
            except EngineLostError as lost:
                self._router.on_call_lost(replica, lost)
                raise ProxyRequestError(502, f"the replica was lost: {lost}") from lost
            finally:
                self._router.on_call_finished(session, replica)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # an error's body
            # Only known versions may stand in what the session records of this call.
            for span in msgspec.json.decode(answer, type=_Answer).meta_info.weight_versions:
                self._router.update_newest_version(pack_weight_version(span.version))
        return answer
