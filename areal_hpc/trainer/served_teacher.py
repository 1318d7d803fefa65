"""Teacher on an SGLang server: log-probabilities of the tokens that it receives.

A request to the server's `/generate` holds a whole row and samples nothing after it; the reply has
the log-probability of each token. It has the ids too, and once, for a part of the vocabulary, the
texts: an id with another text on the server is detected before training.

Rank 0 calls the server, and the ranks meet once a second: a busy server may take longer for a batch
than torch lets ranks wait in one collective, and a rank in a collective notices no stop.
"""

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from areal_hpc.errors import (
    ArealError,
    ClusterError,
    HttpStatusError,
    RecipeError,
    StopRequestedError,
    TeacherError,
    UntrainableBatchError,
)
from areal_hpc.recipe.sections.objective import TeacherConfig
from areal_hpc.rundir.rendezvous import read_user_key
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.collectives import (
    broadcast_object,
    is_true_on_any_rank,
    note_detail,
    note_place_reached,
    raise_on_all_ranks,
)
from areal_hpc.trainer.step import ScoresByRow
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.retry import RETRYABLE_STATUSES, Backoff

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

URL_KEY = "trainer.objective.teacher.url"
MEETING_PERIOD_S = 1.0
CALL_TIMEOUT_S = 120.0
RETRY_S = 300.0
"""Seconds for which a failed call is repeated, while the server is absent or busy."""
WARNING_PERIOD_S = 60.0
MAX_CONCURRENT_CALLS = 16
PROBED_PLAIN_TOKENS = 512
"""Number of plain tokens whose texts are compared, besides all special tokens."""
TOKENS_PER_PROBE = 64
_BACKOFF = Backoff(0.5, 10.0)
_QUARANTINE_HINT = "areal-hpc quarantine sets this batch aside"

TokenEntry = tuple[float | None, int, str | None]
"""Log-probability (None for the first token), id, and the text if it was requested."""


class _GenerateRequest(msgspec.Struct):
    input_ids: Sequence[int]
    logprob_start_len: int
    return_text_in_logprobs: bool = False
    token_ids_logprob: list[int] | None = None
    return_logprob: bool = True
    sampling_params: dict[str, float] = msgspec.field(
        default_factory=lambda: {"max_new_tokens": 0, "temperature": 1.0}
    )


class _MetaInfo(msgspec.Struct):
    input_token_logprobs: list[TokenEntry]


class _Reply(msgspec.Struct):
    meta_info: _MetaInfo


class TeacherClient:
    """Client of one teacher; it repeats each call while the server is absent or busy."""

    def __init__(
        self,
        config: TeacherConfig,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        assert config.url is not None
        self._url = config.url
        self._retry_s = retry_s
        key = ""
        if config.api_key_file is not None:
            key = read_user_key(config.api_key_file, "the teacher's API key")
        self._client = AsyncWireClient(
            config.url, key, tls=ssl.create_default_context(), timeout_s=call_timeout_s
        )
        self._done, self._failure, self._warned_at = "", "", -math.inf

    @property
    def progress(self) -> str:
        return ": ".join(filter(None, (self._done, self._failure)))

    async def aclose(self) -> None:
        await self._client.close()

    async def check_tokenizer(self, model_dir: Path) -> None:
        """Compare texts of tokens with those of a model directory.

        A token beyond its vocabulary ends a server. The server first checks the tokens whose
        probabilities a request names: therefore each request names the model's last token.
        """
        encoder = TokenEncoder.from_model_dir(model_dir)
        plain = encoder.list_plain_text_token_ids()
        sampled = plain[:: max(1, len(plain) // PROBED_PLAIN_TOKENS)]
        probed = sorted({*sampled, *encoder.list_special_token_ids()})
        for first in range(0, len(probed), TOKENS_PER_PROBE):
            self._done = f"{first} of {len(probed)} tokens"
            ids = probed[first : first + TOKENS_PER_PROBE]
            last = [encoder.vocab_size - 1]
            entries = await self._fetch_entries(_GenerateRequest(ids, 0, True, last))
            for policy_id, (_, token, text) in zip(ids, entries, strict=True):
                decoded = encoder.decode([policy_id])
                if token == policy_id and (text is None or text.strip() != decoded.strip()):
                    raise TeacherError(
                        f"token {token} is {text!r} at {self._url}, and {decoded!r} for the policy",
                        key=URL_KEY,
                        hint="serve a model with the policy's tokenizer, and without "
                        "--skip-tokenizer-init",
                    )

    async def score(self, step: int, rows: Sequence[TrainingRow]) -> list[npt.NDArray[np.float32]]:
        """Return for each row the log-probability of each trained token, and 0 for all others."""
        for row in rows:
            _check_distribution(step, row)
        slots, scored = asyncio.Semaphore(MAX_CONCURRENT_CALLS), 0
        self._done = f"0 of {len(rows)} rows"

        async def score_in_turn(row: TrainingRow) -> npt.NDArray[np.float32]:
            nonlocal scored
            async with slots:
                scores_T = await self._score_row(step, row)
            scored += 1
            self._done = f"{scored} of {len(rows)} rows"
            return scores_T

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score_in_turn(row)) for row in rows]
        except ExceptionGroup as failed:  # if several failed at once, any of them will do
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score_row(self, step: int, row: TrainingRow) -> npt.NDArray[np.float32]:
        scores_T = np.zeros(len(row.input_ids_T), np.float32)
        positions = _find_trained_positions(row)
        if not len(positions):
            return scores_T
        ids, start = row.input_ids_T.tolist(), int(positions[0]) - 1
        entries = await self._fetch_entries(_GenerateRequest(ids, start), step)
        for position in positions.tolist():
            logprob, *_ = entries[position - start]
            # Rounding may exceed 0; below -1e4 one token's advantage would drown all others.
            if logprob is None or not -1e4 <= logprob <= 1e-3:
                raise ClusterError(
                    f"batch {step}: {self._url} gave {logprob} for the log-probability of token "
                    f"{position} of {len(ids)}",
                    key=URL_KEY,
                    hint=f"read the server's log; if it scores others well, {_QUARANTINE_HINT}",
                )
            scores_T[position] = logprob
        return scores_T

    async def _fetch_entries(
        self, request: _GenerateRequest, step: int | None = None
    ) -> list[TokenEntry]:
        """Return the entries from `logprob_start_len` on; the first has no log-probability.

        `step` is the step of a row's batch, None for other requests.
        """
        entries = (await self._call(request, step)).meta_info.input_token_logprobs
        tokens = request.input_ids[request.logprob_start_len :]
        # SGLang reports the last token of a vocabulary as 0, with its own log-probability.
        if len(entries) != len(tokens) or any(
            token not in (sent, 0) for (_, token, _), sent in zip(entries, tokens, strict=True)
        ):
            raise TeacherError(
                f"{self._url} answered for other tokens than it was given", key=URL_KEY
            )
        return entries

    async def _call(self, request: _GenerateRequest, step: int | None) -> _Reply:
        give_up_at, failure = math.inf, ""
        for pause_s in _BACKOFF:
            try:
                reply = await self._client.call("/generate", request, _Reply)
                self._failure = ""
                return reply
            except HttpStatusError as error:
                if error.status < 500 and error.status not in RETRYABLE_STATUSES:
                    raise self._build_refusal(error, step) from error
                failure = f"answered {error.status}: {error.body[:300]}"
            except ClusterError as lost:
                failure = lost.problems[0].message
            self._failure, now = failure, time.monotonic()
            give_up_at = min(give_up_at, now + self._retry_s)
            if now + pause_s > give_up_at:
                break
            if now - self._warned_at > WARNING_PERIOD_S:  # many calls may fail at once
                self._warned_at = now
                logger.warning("the teacher at %s: %s; calls are repeated", self._url, failure)
            await asyncio.sleep(pause_s)
        raise ClusterError(
            f"the teacher at {self._url} has not served a call for {self._retry_s:g} s ({failure})",
            key=URL_KEY,
            hint="start the server again, and resume; if it fails at one batch alone, "
            f"{_QUARANTINE_HINT}",
        )

    def _build_refusal(self, error: HttpStatusError, step: int | None) -> RecipeError:
        message = f"the teacher at {self._url} answered {error.status}: {error.body[:300]}"
        match error.status:
            case 401 | 403:
                key = "trainer.objective.teacher.api_key_file"
                return TeacherError(message, key=key, hint="name a file with its --api-key")
            case 400 | 413 | 422:
                hint = "the server must hold rows of the policy's context length, of its tokens"
            case _:
                hint = "give the address of an SGLang server, without a path"
                return TeacherError(message, key=URL_KEY, hint=hint)
        if step is None:
            return TeacherError(message, key=URL_KEY, hint=hint)
        return UntrainableBatchError(
            f"batch {step}: {message}", key=URL_KEY, hint=f"{hint}; {_QUARANTINE_HINT}"
        )


def _find_trained_positions(row: TrainingRow) -> npt.NDArray[np.int64]:
    return np.flatnonzero(row.loss_mask_T[1:]) + 1


def _check_distribution(step: int, row: TrainingRow) -> None:
    positions, temperatures_T = _find_trained_positions(row), row.channels.get(Channel.TEMPERATURE)
    if not len(positions):
        return
    if temperatures_T is not None and (temperatures_T[positions] != 1.0).any():
        sampling = f"temperature {temperatures_T[positions][temperatures_T[positions] != 1.0][0]:g}"
    elif row.sampling_mask is not None:
        has_min_tokens = row.sampling_mask.forbids_T is not None
        sampling = "min_new_tokens" if has_min_tokens else "a sampling mask"
    else:
        return
    raise UntrainableBatchError(
        f"batch {step}: a server gives log-probabilities of the whole softmax at temperature 1, "
        f"got a row sampled with {sampling}",
        key=URL_KEY,
        hint="set rollout.agent.sampling=recipe with rollout.sampling.temperature=1, have the "
        "agent ask without min_tokens, or set "
        f"trainer.objective.teacher.path in the place of url; {_QUARANTINE_HINT}",
    )


class ServedTeacher:
    """A server's log-probabilities on every rank. All methods but `close` are collectives."""

    def __init__(
        self, config: TeacherConfig, model_dir: Path, is_stop_requested: Callable[[], bool]
    ) -> None:
        self._url = config.url
        self._is_stop_requested = is_stop_requested
        self._runner = asyncio.Runner()
        self._client: TeacherClient | None = None  # on rank 0 only

        async def connect() -> None:
            self._client = TeacherClient(config)
            await self._client.check_tokenizer(model_dir)

        self._call_on_first_rank(f"the tokens of the teacher at {config.url}", connect)

    def score(self, step: int, rows: Sequence[TrainingRow]) -> ScoresByRow:
        """Return log-probabilities of the trained tokens in the batch of `step`."""

        async def score_batch() -> ScoresByRow:
            assert self._client is not None
            return await self._client.score(step, rows)

        place = f"scores of batch {step} by the teacher at {self._url}"
        scores = self._call_on_first_rank(place, score_batch)
        lengths = [len(row.input_ids_T) for row in rows]
        flat = torch.zeros(sum(lengths)) if scores is None else torch.from_numpy(np.hstack(scores))
        if dist.get_world_size() > 1:
            dist.broadcast(flat, src=0)
        return np.split(flat.numpy(), np.cumsum(lengths)[:-1])

    def close(self) -> None:
        if self._client is not None:
            self._runner.get_loop().run_until_complete(self._client.aclose())
        self._runner.close()

    def _call_on_first_rank(
        self, place_name: str, call: Callable[[], Coroutine[Any, Any, ResultT]]
    ) -> ResultT | None:
        note_place_reached(place_name)
        loop = self._runner.get_loop()
        task = loop.create_task(call()) if dist.get_rank() == 0 else None
        while True:
            is_over, progress = False, ""
            if task:
                loop.run_until_complete(asyncio.wait({task}, timeout=MEETING_PERIOD_S))
                is_over, progress = task.done(), self._client.progress if self._client else ""
            is_over, progress = broadcast_object((is_over, progress), tuple[bool, str])
            note_detail(progress)
            if is_over:
                break
            if is_true_on_any_rank(self._is_stop_requested()):
                if task:
                    task.cancel()
                    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
                raise StopRequestedError
        result, failure = None, None
        if task:
            try:
                result = task.result()
            except ArealError as error:
                failure = error
        raise_on_all_ranks(failure)
        return result
