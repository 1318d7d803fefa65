"""Teacher that a server holds, for all ranks: rank 0 asks it, and the ranks meet once a second.

A batch may take a busy server longer than torch lets ranks wait in one collective, and a rank in a
collective hears no stop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct

from areal_hpc.errors import ArealError, StopRequestedError
from areal_hpc.recipe.sections.trainer import TeacherConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.collectives import (
    broadcast_object,
    is_true_on_any_rank,
    raise_on_all_ranks,
)
from areal_hpc.trainer.rank_progress import note_detail, note_place_reached
from areal_hpc.trainer.scoring.teacher_client import TeacherClient
from areal_hpc.trainer.scoring.token_scores import ScoresByRow

MEETING_PERIOD_S = 1.0

ResultT = TypeVar("ResultT")


class _TeacherProgress(Struct, frozen=True):
    is_over: bool
    progress: str


class ServedTeacher:
    """A server's log-probabilities on every rank. All methods but `close` are collectives."""

    def __init__(
        self, config: TeacherConfig, model_dir: Path, is_stop_requested: Callable[[], bool]
    ) -> None:
        self._config = config
        self._is_stop_requested = is_stop_requested
        self._runner = asyncio.Runner()
        self._client: TeacherClient | None = None  # on rank 0 alone

        async def connect() -> None:
            self._client = TeacherClient(self._config)
            await self._client.raise_if_tokenizer_differs(model_dir)

        self._call_on_first_rank(f"the tokens of the teacher at {config.url}", connect)

    def score(self, step: int, rows: Sequence[TrainingRow]) -> ScoresByRow:
        """Log-probabilities of the trained tokens of the batch of `step`."""

        async def ask() -> ScoresByRow:
            assert self._client is not None
            return await self._client.score(step, rows)

        place = f"scores of batch {step} by the teacher at {self._config.url}"
        found = self._call_on_first_rank(place, ask)
        lengths = [len(row.input_ids_T) for row in rows]
        flat = torch.zeros(sum(lengths)) if found is None else torch.from_numpy(np.hstack(found))
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
            held = None
            if task:
                loop.run_until_complete(asyncio.wait({task}, timeout=MEETING_PERIOD_S))
                held = _TeacherProgress(task.done(), self._client.progress if self._client else "")
            meeting: _TeacherProgress = broadcast_object(held, _TeacherProgress)
            note_detail(meeting.progress)
            if meeting.is_over:
                break
            if is_true_on_any_rank(self._is_stop_requested()):
                if task:
                    task.cancel()
                    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
                raise StopRequestedError
        found, trouble = None, None
        if task:
            try:
                found = task.result()
            except ArealError as error:
                trouble = error
        raise_on_all_ranks(trouble)
        return found
