"""Measurement of how long a weight update pauses generation.

SGLang publishes its load after every batch of prompts, every 15th batch of decoding, and when it
has nothing to do (`Scheduler.publish_load_snapshot`, sglang 0.5.23), and none while it is paused.
So the load read within a pause is that of at most 15 tokens a request before it, and the first one
published after it means that tokens come again: at once where prompts are computed anew, up to 15
batches late where the old cache stays in use.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from areal_hpc.inference.replica import Replica
from areal_hpc.inference.server.sglang_server import SGLangServer
from areal_hpc.inference.update_state import WEIGHT_CHANGING_ROUTES
from areal_hpc.wire.replicas import UpdatePauseStats

log = logging.getLogger(__name__)

FIRST_TOKEN_POLL_S = 0.01
FIRST_TOKEN_TIMEOUT_S = 120.0
_RESUME_SERVING_TIMEOUT_S = 5.0


class _SchedulerLoad(msgspec.Struct):
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int


class _SchedulerLoads(msgspec.Struct):
    loads: list[_SchedulerLoad]


ReadServerLoad = Callable[[SGLangServer], Awaitable[bytes]]
"""The body of SGLang's answer about its load."""


class UpdatePauseTimer:
    """Follows the control calls of one replica; all in the control proxy's event loop."""

    def __init__(self, replica: Replica, read_load: ReadServerLoad) -> None:
        self._replica = replica
        self._read = read_load
        self._mode = ""
        self._paused_at = 0.0
        self._before: _SchedulerLoad | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def on_call_accepted(
        self, route: str, body: bytes, server: SGLangServer, asked_at: float
    ) -> None:
        """SGLang accepted a control call that was made at `asked_at` (`time.time`)."""
        if route == "pause_generation":
            self._mode = str(msgspec.json.decode(body, type=dict[str, object]).get("mode"))
            self._paused_at, self._before = asked_at, None
        elif route in WEIGHT_CHANGING_ROUTES and self._paused_at:
            # It takes its orders one after the other: now it is paused.
            self._start_guarded_task(self._record_load_before_pause(server))
        elif route == "continue_generation" and self._before is not None:
            paused_s = asked_at - self._paused_at
            self._start_guarded_task(
                self._measure_and_record_pause(server, self._before, paused_s, asked_at)
            )
            self._before, self._paused_at = None, 0.0

    def _start_guarded_task(self, measurement: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await measurement
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
                index = self._replica.index
                log.info("replica %d: generation pause was not measured: %s", index, error)

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_load_before_pause(self, server: SGLangServer) -> None:
        self._before = await self._read_newest_load(server)

    async def _measure_and_record_pause(
        self,
        server: SGLangServer,
        load_before: _SchedulerLoad,
        paused_s: float,
        continued_at: float,
    ) -> None:
        token_at = continued_at
        if (
            load_before.num_running_reqs
            or load_before.num_waiting_reqs
            or load_before.num_used_tokens
        ):
            give_up_at = continued_at + FIRST_TOKEN_TIMEOUT_S
            while (
                load := await self._read_newest_load(server)
            ) is None or load.timestamp < continued_at:
                if time.time() > give_up_at:
                    return
                await asyncio.sleep(FIRST_TOKEN_POLL_S)
            token_at = load.timestamp
        # The sender opens the replica right after it let generation go on.
        give_up_at = time.time() + _RESUME_SERVING_TIMEOUT_S
        while not (version := self._replica.build_view().version) and time.time() < give_up_at:
            await asyncio.sleep(FIRST_TOKEN_POLL_S)
        reprefill_s = token_at - continued_at
        self._replica.record_update_pause(
            UpdatePauseStats(
                version,
                round(paused_s + reprefill_s, 4),
                round(reprefill_s, 4),
                load_before.num_running_reqs + load_before.num_waiting_reqs,
                load_before.num_used_tokens if self._mode == "retract" else 0,
            )
        )

    async def _read_newest_load(self, server: SGLangServer) -> _SchedulerLoad | None:
        loads = msgspec.json.decode(await self._read(server), type=_SchedulerLoads).loads
        return max(loads, key=lambda load: load.timestamp, default=None)
