"""`AsyncRewardWrapper`: calls of blocking reward functions in worker processes."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.wire.agent_reward import parse_reward_number

log = logging.getLogger(__name__)


class AsyncRewardWrapper:
    """Wrapper that runs a blocking reward function in processes: `await wrapper(...)`.

    A try that takes too long is killed; after the last one the reward is 0. A try that raises,
    or whose process dies, is repeated; the last error is raised. Names and defaults are AReaL's
    (`areal/api/reward_api.py`).

    Args:
        reward_fn: Any function; one that cannot be imported by its name is pickled.
        timeout_seconds: Time limit of one try.
        max_workers: Number of processes; None: the machine's number of cores.
        max_retries: Number of tries.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        if max_retries < 1:
            raise ValueError(f"max_retries must be at least 1, got {max_retries}")
        self._reward_fn = reward_fn
        self._timeout_s = timeout_seconds
        self._tries = max_retries
        self._pool = ProcessPool(max_workers or os.cpu_count() or 1)

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
                async with (
                    self._pool.acquire() as process,
                    asyncio.timeout(self._timeout_s) as limit,
                ):
                    returned = await process.call(self._reward_fn, *args, **kwargs)
                    return parse_reward_number(returned)
            except Exception as error:  # boundary: the user's function; the last error is raised
                if limit is not None and limit.expired():
                    log.warning(
                        "a reward took longer than %g s; %d tries left", self._timeout_s, tries_left
                    )
                elif not tries_left:
                    raise
                else:
                    log.warning("a reward failed, %d tries left: %s", tries_left, error)
        return 0.0

    def close(self) -> None:
        """Kill idle processes, which otherwise end with this process."""
        self._pool.close_idle_workers()
