"""`/generate` passthrough for clients that record their own calls."""

import contextlib
import time
from typing import Annotated

import msgspec

from areal_hpc.errors import RequestError
from areal_hpc.proxy.engine.generation import EngineLostError
from areal_hpc.proxy.engine.router import Router, parse_packed_version
from areal_hpc.proxy.engine.sglang_client import SGLangClient
from areal_hpc.proxy.sessions.store import Session


class _Sampling(msgspec.Struct, frozen=True):
    max_new_tokens: int | None = None


class _Request(msgspec.Struct):
    """Fields of a request that is passed on, as far as the proxy reads them."""

    input_ids: list[Annotated[int, msgspec.Meta(ge=0)]]
    rid: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool = False
    sampling_params: _Sampling = _Sampling()


class _VersionSpan(msgspec.Struct):
    version: str = ""


class _MetaInfo(msgspec.Struct):
    weight_versions: list[_VersionSpan] = []


class _Answer(msgspec.Struct):
    """Fields of an answer, as far as the proxy reads them: which weights sampled it."""

    meta_info: _MetaInfo


class GeneratePassthrough:
    """Passes requests of sessions on to the replica that each session sticks to."""

    def __init__(
        self,
        router: Router,
        upstream: SGLangClient,
        vocab_size: int,
        context_tokens: int,
        timeout_s: float,
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s

    async def generate(self, session: Session, body: bytes) -> bytes:
        """The replica's answer.

        Raises:
            RequestError: The request is none for this model; or (502) the replica was lost, and
                another will answer when the request is repeated.
        """
        try:
            request = msgspec.json.decode(body, type=_Request)
        except msgspec.DecodeError as error:
            raise RequestError(400, str(error)) from error
        if request.stream:
            raise RequestError(400, "streaming is not supported on /generate", key="stream")
        # SGLang dies of an id outside its vocabulary.
        if not request.input_ids or max(request.input_ids) >= self._vocab_size:
            message = f"expected ids below {self._vocab_size}, and one at least"
            raise RequestError(400, message, key="input_ids")
        body = self._clamp_max_new_tokens(request, body)
        give_up_at = time.monotonic() + self._timeout_s
        replica = await self._router.pick_replica(session.session_id, give_up_at)
        left_s = max(1.0, give_up_at - time.monotonic())
        self._router.on_call_started(replica)
        session.in_flight += 1
        try:
            answer = await self._upstream.forward(replica.url, request.rid, body, left_s)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # an error's body
                # Only known versions may stand in what the session records of this call.
                for span in msgspec.json.decode(answer, type=_Answer).meta_info.weight_versions:
                    self._router.update_newest_version(parse_packed_version(span.version))
            return answer
        except EngineLostError as lost:
            self._router.on_replica_lost(replica)
            raise RequestError(502, f"the replica was lost: {lost}") from lost
        finally:
            session.in_flight -= 1
            session.touch()
            self._router.on_call_finished(replica)

    def _clamp_max_new_tokens(self, request: _Request, body: bytes) -> bytes:
        """The body, its reply bounded by what the context has left: SGLang would refuse more.

        A client in a driver knows its tokenizer, and not how long a context the replicas have.
        """
        room = self._context_tokens - len(request.input_ids)
        if room < 1:
            message = (
                f"the prompt's {len(request.input_ids)} tokens leave no room in the model's "
                f"context of {self._context_tokens} tokens"
            )
            raise RequestError(400, message, key="input_ids")
        if (request.sampling_params.max_new_tokens or 0) <= room:
            return body
        fields = msgspec.json.decode(body)
        fields["sampling_params"]["max_new_tokens"] = room
        return msgspec.json.encode(fields)
