"""Client of a teacher that an SGLang server holds: log-probabilities of tokens that it is given.

A row goes to the server's `/generate` whole, with nothing to be sampled after it; the server says
how likely it finds each token. It says their ids too, and once, of a part of the vocabulary, their
texts: an id that means another text there is found before anything is trained.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from areal_hpc.errors import ClusterError, RecipeError, TeacherError, UntrainableBatchError
from areal_hpc.recipe.sections.trainer import TeacherConfig
from areal_hpc.rundir.rendezvous import read_user_key
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.batch.packing import TEMPERATURE_CHANNEL, TrainingRow
from areal_hpc.wire.retry import RETRYABLE_STATUSES, Backoff

logger = logging.getLogger(__name__)

URL_KEY, API_KEY_FILE_KEY = (
    f"trainer.objective.teacher.{name}" for name in ("url", "api_key_file")
)
CONNECT_TIMEOUT_S, CALL_TIMEOUT_S = 10.0, 120.0
RETRY_S = 300.0
"""A call that failed is repeated for so long, while the server is away or busy."""
MAX_CONCURRENT_CALLS = 16
WARNING_PERIOD_S = 30.0
MAX_REPLY_BYTES, MAX_REPLY_BYTES_PER_TOKEN = 1 << 20, 1 << 10
"""A reply may be 1 MiB and 1 KiB a token; 100 bytes a token are usual."""
MAX_LOGPROB = 1e-3
"""A log-probability is 0 at most, but for rounding."""
MIN_PLAUSIBLE_LOGPROB = -1e4
"""Softmaxes give more; the advantage of such a token would drown all others."""
PROBED_PLAIN_TOKENS = 512
"""Plain tokens whose texts are compared, besides all special ones."""
TOKENS_PER_PROBE = 64
_BACKOFF = Backoff(0.5, 10.0)
_ROW_REFUSALS = (
    httpx.codes.BAD_REQUEST,
    httpx.codes.REQUEST_ENTITY_TOO_LARGE,
    httpx.codes.UNPROCESSABLE_ENTITY,
)
_QUARANTINE_HINT = "areal-hpc quarantine sets this batch aside"

TokenEntry = tuple[float | None, int, str | None]
"""Log-probability, id, and text if it was asked for. Of the first token there is no probability."""


class _MetaInfo(Struct):
    input_token_logprobs: list[TokenEntry]


class _Reply(Struct):
    meta_info: _MetaInfo


class TeacherClient:
    """Calls of one teacher, each repeated while the server is away or busy."""

    def __init__(
        self,
        config: TeacherConfig,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        retry_s: float = RETRY_S,
        max_concurrent_calls: int = MAX_CONCURRENT_CALLS,
    ) -> None:
        assert config.url is not None
        self._url = f"{config.url.rstrip('/')}/generate"
        self._call_timeout_s, self._retry_s = call_timeout_s, retry_s
        self._max_concurrent_calls = max_concurrent_calls
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if config.api_key_file is not None:
            key = read_user_key(config.api_key_file, "the teacher's API key")
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_concurrent_calls),
            trust_env=False,
        )
        self._done, self._trouble = "", ""
        self._warned_at = float("-inf")

    @property
    def progress(self) -> str:
        return ": ".join(filter(None, (self._done, self._trouble)))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def raise_if_tokenizer_differs(self, model_dir: Path) -> None:
        """Compare texts of tokens with those of a model directory.

        A server that is given a token beyond its vocabulary ends. It looks first at those whose
        probabilities it is asked for: so it is asked for that of the model's last one.
        """
        encoder = TokenEncoder.from_model_dir(model_dir)
        plain = encoder.list_plain_text_token_ids()
        sampled = plain[:: max(1, len(plain) // PROBED_PLAIN_TOKENS)]
        probed = sorted({*sampled, *encoder.list_special_token_ids()})
        asked = {
            "return_text_in_logprobs": True,
            "token_ids_logprob": [encoder.vocab_size - 1],
        }
        for first in range(0, len(probed), TOKENS_PER_PROBE):
            self._done = f"{first} of {len(probed)} tokens"
            ids = probed[first : first + TOKENS_PER_PROBE]
            entries = await self._request_entries(ids, 0, asked)
            for own_id, (_, token, text) in zip(ids, entries, strict=True):
                own = encoder.decode([own_id])
                if token == own_id and (text is None or text.strip() != own.strip()):
                    raise TeacherError(
                        f"token {token} is {text!r} at {self._url}, and {own!r} for the policy",
                        key=URL_KEY,
                        hint="serve a model with the policy's tokenizer, and without "
                        "--skip-tokenizer-init",
                    )

    async def score(self, step: int, rows: Sequence[TrainingRow]) -> list[npt.NDArray[np.float32]]:
        """For each row of a batch the log-probability of each trained token, 0 at all others."""
        for row in rows:
            _raise_if_distribution_differs(step, row)
        turns, scored = asyncio.Semaphore(self._max_concurrent_calls), 0
        self._done = f"0 of {len(rows)} rows"

        async def score_in_turn(row: TrainingRow) -> npt.NDArray[np.float32]:
            nonlocal scored
            async with turns:
                scores_T = await self._score_row(step, row)
            scored += 1
            self._done = f"{scored} of {len(rows)} rows"
            return scores_T

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score_in_turn(row)) for row in rows]
        except ExceptionGroup as failed:  # of several that failed at once any will do
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score_row(self, step: int, row: TrainingRow) -> npt.NDArray[np.float32]:
        scores_T = np.zeros(len(row.input_ids_T), np.float32)
        places = _find_trained_places(row)
        if not len(places):
            return scores_T
        ids = row.input_ids_T.tolist()
        entries = await self._request_entries(ids, int(places[0]) - 1, step=step)
        first = len(ids) - len(entries)
        for place in places.tolist():
            logprob, *_ = entries[place - first]
            if logprob is None or not MIN_PLAUSIBLE_LOGPROB <= logprob <= MAX_LOGPROB:
                raise ClusterError(
                    f"batch {step}: {self._url} gave {logprob} for the log-probability of token "
                    f"{place} of {len(ids)}",
                    key=URL_KEY,
                    hint=f"read the server's log; if it scores others well, {_QUARANTINE_HINT}",
                )
            scores_T[place] = logprob
        return scores_T

    async def _request_entries(
        self,
        ids: Sequence[int],
        start: int,
        request_fields: Mapping[str, object] = MappingProxyType({}),
        step: int | None = None,
    ) -> list[TokenEntry]:
        """Entries of the tokens from `start` on, the first of which has no log-probability.

        With a `step` they are of a row of its batch.
        """
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            **request_fields,
        }
        max_bytes = MAX_REPLY_BYTES + MAX_REPLY_BYTES_PER_TOKEN * len(ids)
        status, content = await self._post_with_retries(msgspec.json.encode(body), max_bytes)
        if status != httpx.codes.OK:
            raise self._build_refusal(status, content, step)
        try:
            entries = msgspec.json.decode(content, type=_Reply).meta_info.input_token_logprobs
        except msgspec.DecodeError as error:
            raise TeacherError(
                f"{self._url} does not answer as SGLang's /generate does: {error}",
                key=URL_KEY,
                hint="give the address of an SGLang server, without a path",
            ) from error
        # SGLang calls the last token of a vocabulary 0, with the log-probability of its own.
        if len(entries) != len(ids) - start or any(
            token not in (own, 0) for (_, token, _), own in zip(entries, ids[start:], strict=True)
        ):
            raise TeacherError(
                f"{self._url} answered for other tokens than the {len(ids) - start} it was given",
                key=URL_KEY,
                hint="give the address of an SGLang server, not of a proxy that changes prompts",
            )
        return entries

    async def _post_with_retries(self, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        give_up_at, trouble = None, ""
        for pause_s in _BACKOFF:
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    status, content = await self._post(body, max_bytes)
                if status < httpx.codes.INTERNAL_SERVER_ERROR and status not in RETRYABLE_STATUSES:
                    self._trouble = ""
                    return status, content
                trouble = f"answered {status}: {_quote(content)}"
            except TimeoutError:
                trouble = f"no answer within {self._call_timeout_s:g} s"
            except httpx.RequestError as error:
                trouble = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            give_up_at = give_up_at or now + self._retry_s
            if now + pause_s > give_up_at:
                break
            self._note_trouble(trouble)
            await asyncio.sleep(pause_s)
        raise ClusterError(
            f"the teacher at {self._url} has not served a call for {self._retry_s:g} s ({trouble})",
            key=URL_KEY,
            hint="start the server again, and resume; if it fails at one batch alone, "
            f"{_QUARANTINE_HINT}",
        )

    def _note_trouble(self, problem: str) -> None:
        if self._trouble:
            return  # the first since the last answer says where it stands still
        self._trouble = problem
        now = time.monotonic()
        if now - self._warned_at < WARNING_PERIOD_S:
            return  # a server that is busy by half fails call after call, between others
        self._warned_at = now
        logger.warning(
            "the teacher at %s: %s; calls are repeated for %g s",
            self._url,
            problem,
            self._retry_s,
        )

    async def _post(self, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        content = bytearray()
        async with self._client.stream("POST", self._url, content=body) as answer:
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > max_bytes:
                    raise TeacherError(
                        f"{self._url} answered more than {max_bytes} bytes to a row",
                        key=URL_KEY,
                        hint="give the address of an SGLang server",
                    )
            return answer.status_code, bytes(content)

    def _build_refusal(self, status_code: int, content: bytes, step: int | None) -> RecipeError:
        message = f"the teacher at {self._url} answered {status_code}: {_quote(content)}"
        if status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "name a file with the server's --api-key"
            return TeacherError(message, key=API_KEY_FILE_KEY, hint=hint)
        if status_code not in _ROW_REFUSALS:
            hint = "give the address of an SGLang server, without a path"
            return TeacherError(message, key=URL_KEY, hint=hint)
        hint = "the server must hold rows of the policy's context length, of its tokens"
        if step is None:
            return TeacherError(message, key=URL_KEY, hint=hint)
        return UntrainableBatchError(
            f"batch {step}: {message}", key=URL_KEY, hint=f"{hint}; {_QUARANTINE_HINT}"
        )


def _find_trained_places(row: TrainingRow) -> npt.NDArray[np.int64]:
    return np.flatnonzero(row.loss_mask_T[1:]) + 1


def _raise_if_distribution_differs(step: int, row: TrainingRow) -> None:
    places, temperatures_T = _find_trained_places(row), row.channels.get(TEMPERATURE_CHANNEL)
    if not len(places):
        return
    if temperatures_T is not None and (temperatures_T[places] != 1.0).any():
        found = f"temperature {temperatures_T[places][temperatures_T[places] != 1.0][0]:g}"
    elif row.sampling_mask is not None:
        is_least = row.sampling_mask.forbids_T is not None
        found = "min_new_tokens" if is_least else "a sampling mask"
    else:
        return
    raise UntrainableBatchError(
        f"batch {step}: a server gives log-probabilities of the whole softmax at temperature 1, "
        f"got a row sampled with {found}",
        key=URL_KEY,
        hint="set rollout.agent.sampling=recipe with rollout.sampling.temperature=1, have the "
        "agent ask without min_tokens, or set "
        f"trainer.objective.teacher.path in the place of url; {_QUARANTINE_HINT}",
    )


def _quote(content: bytes) -> str:
    return content[:300].decode(errors="replace")
