"""`AsyncRewardWrapper`: calls of reward functions, blocking ones in worker processes."""

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.session.credit import parse_reward

log = logging.getLogger(__name__)


class AsyncRewardWrapper:
    """Wrapper that runs a reward function, a blocking one in processes: `await wrapper(...)`.

    A try that takes too long is killed; after the last one the reward is `timeout_reward`. A
    try that raises, or whose process dies, is repeated; the last error is raised. Names and
    defaults are AReaL's (`areal/api/reward_api.py`).

    Args:
        reward_fn: Any function; one that cannot be imported by its name is pickled.
        timeout_seconds: Time limit of one try.
        max_workers: Number of processes; None: the machine's number of cores. For an asynchronous
            function the limit on concurrent calls; None: 32.
        max_retries: Number of tries.
        timeout_reward: None: raise TimeoutError.
        environ: Environment of the processes; None: that of this process.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
        *,
        timeout_reward: float | None = 0.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if max_retries < 1:
            raise ValueError(f"max_retries must be at least 1, got {max_retries}")
        self._reward_fn = reward_fn
        self._timeout_s = timeout_seconds
        self._tries = max_retries
        self._timeout_reward = timeout_reward
        self._is_async = any(
            map(inspect.iscoroutinefunction, (reward_fn, type(reward_fn).__call__))
        )
        self._pool = ProcessPool(max_workers or os.cpu_count() or 1, environ)
        self._slots = asyncio.Semaphore(max_workers or 32)

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        """Return the reward for these arguments.

        Raises:
            InvalidRewardError: The function returned no finite number.
            Exception: The function's last exception; `WorkerLostError` if it killed its process,
                `WorkerStartError` if the node could not start one.
        """
        for tries_left in reversed(range(self._tries)):
            limit: asyncio.Timeout | None = None
            try:
                async with self._acquire() as call, asyncio.timeout(self._timeout_s) as limit:
                    return parse_reward(await call(*args, **kwargs)).value
            except Exception as error:  # boundary: the user's function; the last error is raised
                is_late = limit is not None and limit.expired()
                if not tries_left and not (is_late and self._timeout_reward is not None):
                    raise
                reason = (
                    f"took longer than {self._timeout_s:g} s" if is_late else f"failed: {error}"
                )
                log.warning("a reward %s; %d tries left", reason, tries_left)
        assert self._timeout_reward is not None
        return self._timeout_reward

    @asynccontextmanager
    async def _acquire(self) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        if self._is_async:
            async with self._slots:
                yield self._reward_fn
        else:
            async with self._pool.acquire() as process:
                yield partial(process.call, self._reward_fn)

    def close(self) -> None:
        """Kill idle processes, which otherwise end with this process."""
        self._pool.close_idle_workers()
