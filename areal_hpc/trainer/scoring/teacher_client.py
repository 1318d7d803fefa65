"""Client of a teacher that an SGLang server holds: log-probabilities of tokens that it is given.

A row goes to the server's `/generate` whole, with nothing to be sampled after it; the server says
how likely it finds each token. It says their ids too, and once, of a part of the vocabulary, their
texts: an id that means another text there is found before anything is trained.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.recipe.sections.trainer import TeacherConfig
from areal_hpc.rundir.rendezvous import read_user_key
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.batch.packing import TEMPERATURE_CHANNEL, TrainingRow
from areal_hpc.wire.backoff import Backoff
from areal_hpc.wire.http import RETRYABLE_STATUSES

URL_KEY, API_KEY_FILE_KEY = (
    f"trainer.objective.teacher.{name}" for name in ("url", "api_key_file")
)
MAX_REPLY_BYTES = 256 << 20
PROBED_TOKENS = 512
"""Plain tokens whose texts are compared, besides all special ones."""
TOKENS_PER_PROBE = 64
_BACKOFF = Backoff(0.5, 10.0)

TokenEntry = tuple[float | None, int, str | None]
"""Log-probability, id, and text if it was asked for. Of the first token there is no probability."""


class _MetaInfo(Struct):
    input_token_logprobs: list[TokenEntry]


class _Reply(Struct):
    meta_info: _MetaInfo


class TeacherClient:
    """Calls of one teacher, so many at once, each repeated while the server is away or busy.

    Raises:
        RecipeError: The key's file cannot be used.
    """

    def __init__(self, config: TeacherConfig) -> None:
        assert config.url is not None
        self._config, self._url = config, f"{config.url.rstrip('/')}/generate"
        headers = {}
        if config.api_key_file is not None:
            key = read_user_key(config.api_key_file, "the teacher's API key")
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=config.max_concurrent),
            trust_env=False,
        )

    def close(self) -> None:
        """Close pooled connections."""
        self._client.close()

    def check_tokenizer(self, model_dir: Path) -> None:
        """Compare texts of tokens with those of a model directory.

        A server that is given a token beyond its vocabulary ends. It looks first at those whose
        probabilities it is asked for: so it is asked for that of the model's last one.

        Raises:
            RecipeError: They differ, or the server knows no texts.
            ClusterError: The server does not answer.
        """
        encoder = TokenEncoder.from_model_dir(model_dir)
        probed = _choose_probed_ids(encoder)
        asked = {
            "return_text_in_logprobs": True,
            "token_ids_logprob": [encoder.vocab_size - 1],
        }
        for first in range(0, len(probed), TOKENS_PER_PROBE):
            ids = probed[first : first + TOKENS_PER_PROBE]
            for own_id, (_, token, text) in zip(
                ids, self._request_entries(ids, 0, asked), strict=True
            ):
                own = encoder.decode([own_id])
                if token == own_id and (text is None or text.strip() != own.strip()):
                    raise RecipeError(
                        f"token {token} is {text!r} at {self._url}, and {own!r} for the policy",
                        key=URL_KEY,
                        hint="serve a model with the policy's tokenizer, and without "
                        "--skip-tokenizer-init",
                    )

    def score(self, rows: Sequence[TrainingRow]) -> list[npt.NDArray[np.float32]]:
        """For each row the log-probability of each trained token, 0 at all others.

        Raises:
            RecipeError: A row cannot be scored there as it was sampled, or the server refuses it.
            ClusterError: The server does not answer.
        """
        pool = ThreadPoolExecutor(self._config.max_concurrent, "teacher")
        try:
            return list(pool.map(self._score_row, rows))
        finally:
            pool.shutdown(cancel_futures=True)

    def _score_row(self, row: TrainingRow) -> npt.NDArray[np.float32]:
        scores_T = np.zeros(len(row.input_ids_T), np.float32)
        places = np.flatnonzero(row.loss_mask_T[1:]) + 1
        if not len(places):
            return scores_T
        _raise_if_distribution_differs(row, places)
        ids = row.input_ids_T.tolist()
        entries = self._request_entries(ids, int(places[0]) - 1)
        first = len(ids) - len(entries)
        for place in places.tolist():
            logprob, *_ = entries[place - first]
            if logprob is None:
                raise ClusterError(
                    f"{self._url} gave no log-probability of token {place} of {len(ids)}",
                    key=URL_KEY,
                    hint="read the server's log",
                )
            scores_T[place] = logprob
        return scores_T

    def _request_entries(
        self, ids: Sequence[int], start: int, asked: Mapping[str, object] = MappingProxyType({})
    ) -> list[TokenEntry]:
        """Entries of the tokens from `start` on, the first of which has no log-probability."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            **asked,
        }
        content = self._post_until_answered(msgspec.json.encode(body))
        try:
            entries = msgspec.json.decode(content, type=_Reply).meta_info.input_token_logprobs
        except msgspec.DecodeError as error:
            raise RecipeError(
                f"{self._url} does not answer as SGLang's /generate does: {error}",
                key=URL_KEY,
                hint="give the address of an SGLang server, without a path",
            ) from error
        told = [token for _, token, _ in entries]
        # SGLang calls the last token of a vocabulary 0, with the log-probability of its own.
        if len(told) != len(ids) - start or any(
            token not in (own, 0) for token, own in zip(told, ids[start:], strict=True)
        ):
            raise RecipeError(
                f"{self._url} answered for other tokens than the {len(ids) - start} it was given",
                key=URL_KEY,
                hint="give the address of an SGLang server, not of a proxy that changes prompts",
            )
        return entries

    def _post_until_answered(self, body: bytes) -> bytes:
        give_up_at, trouble = time.monotonic() + self._config.retry_s, ""
        for pause_s in _BACKOFF:
            try:
                status, content = self._post(body)
                if status not in RETRYABLE_STATUSES:
                    return self._check_status(status, content)
                trouble = f"answered {status}: {_quote(content)}"
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause_s >= give_up_at:
                break
            time.sleep(pause_s)
        raise ClusterError(
            f"the teacher at {self._url} has not answered for {self._config.retry_s:g} s "
            f"({trouble})",
            key=URL_KEY,
            hint="start the server again; trainer.objective.teacher.retry_s lets the trainer wait "
            "longer, and timeout_s each call",
        )

    def _post(self, body: bytes) -> tuple[int, bytes]:
        headers, content = {"Content-Type": "application/json"}, bytearray()
        with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise RecipeError(
                        f"{self._url} answered more than {MAX_REPLY_BYTES >> 20} MiB to a row",
                        key=URL_KEY,
                        hint="give the address of an SGLang server",
                    )
            return answer.status_code, bytes(content)

    def _check_status(self, status: int, content: bytes) -> bytes:
        if status == httpx.codes.OK:
            return content
        is_key = status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        raise RecipeError(
            f"the teacher at {self._url} answered {status}: {_quote(content)}",
            key=API_KEY_FILE_KEY if is_key else URL_KEY,
            hint="name a file with the server's --api-key"
            if is_key
            else "the server must hold rows of the policy's context length, of its tokens",
        )


def _choose_probed_ids(encoder: TokenEncoder) -> list[int]:
    """Ids of all special tokens, and of so many others, evenly apart."""
    plain = encoder.list_plain_text_token_ids()
    chosen = plain[:: max(1, len(plain) // PROBED_TOKENS)]
    return sorted({*chosen, *encoder.list_special_token_ids()})


def _raise_if_distribution_differs(row: TrainingRow, places: npt.NDArray[np.int64]) -> None:
    """A server's log-probabilities are of the softmax at temperature 1, over all tokens."""
    temperatures_T = row.channels.get(TEMPERATURE_CHANNEL)
    if temperatures_T is not None and (temperatures_T[places] != 1.0).any():
        found = f"temperature {temperatures_T[places][temperatures_T[places] != 1.0][0]:g}"
    elif row.sampling_mask is not None:
        found = "a sampling mask"
    else:
        return
    raise RecipeError(
        "a server gives log-probabilities of the whole softmax at temperature 1, got a row sampled "
        f"with {found}",
        key=URL_KEY,
        hint="set rollout.agent.sampling=recipe with rollout.sampling.temperature=1, or "
        "trainer.objective.teacher.path in the place of url",
    )


def _quote(content: bytes) -> str:
    return content[:300].decode(errors="replace")
