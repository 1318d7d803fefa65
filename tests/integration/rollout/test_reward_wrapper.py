"""Blocking reward functions run beside the event loop, with time limits and tries."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import WorkerLostError
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
from tests.integration.rollout import reward_functions as functions
from tests.support.deadlines import scaled


def reward(function: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> float:
    async def ask() -> float:
        wrapper = AsyncRewardWrapper(function, **{"max_workers": 1, **(options or {})})
        try:
            return await wrapper(*args, **kwargs)
        finally:
            wrapper.close()

    return asyncio.run(ask())


def test_the_event_loop_goes_on_while_rewards_are_computed(tmp_path: Path) -> None:
    sign, note = tmp_path / "sign", tmp_path / "note"

    async def ask() -> list[float]:
        wrapper = AsyncRewardWrapper(functions.waits, timeout_seconds=scaled(60.0), max_workers=2)
        asking = asyncio.gather(*(wrapper(str(sign), str(note)) for _ in range(4)))
        while not note.exists() or len(note.read_text().splitlines()) < 2:
            await asyncio.sleep(0.01)
        sign.touch()  # they wait for what only a loop that goes on can give them
        rewards = await asking
        wrapper.close()
        return rewards

    assert asyncio.run(ask()) == [1.0] * 4
    assert len(set(note.read_text().split())) == 2


def test_keywords_reach_the_function_and_bools_are_rewards() -> None:
    assert reward(functions.is_equal, result="4", answer="4") == 1.0
    assert reward(functions.always_true, anything=1) == 1.0


def test_a_hanging_reward_is_killed_and_counts_zero(caplog: pytest.LogCaptureFixture) -> None:
    options = {"timeout_seconds": 0.5, "max_retries": 2}
    before = multiprocessing.active_children()  # servers that the tests keep
    assert reward(time.sleep, 600, options=options) == 0.0
    tries = [record.getMessage() for record in caplog.records]
    assert [one.partition(";")[0] for one in tries] == ["a reward took longer than 0.5 s"] * 2
    assert multiprocessing.active_children() == before


def test_a_reward_that_raises_is_tried_again(tmp_path: Path) -> None:
    assert reward(functions.raises, str(tmp_path / "a"), 2) == 0.5
    with pytest.raises(ValueError, match="not yet"):
        reward(functions.raises, str(tmp_path / "b"), 3)
    with pytest.raises(TimeoutError, match="the judge did not answer"):
        reward(functions.asks_in_vain, options={"max_retries": 2})


def test_a_reward_whose_process_dies_is_tried_again(tmp_path: Path) -> None:
    assert reward(functions.dies, str(tmp_path / "a"), 1) == 0.5
    with pytest.raises(WorkerLostError, match="exited with code 3"):
        reward(functions.dies, str(tmp_path / "b"), 9, options={"max_retries": 2})


SLOW_START = """
import pathlib, time
gate, give_up_at = pathlib.Path({gate!r}), time.monotonic() + {patience_s}
while not gate.exists() and time.monotonic() < give_up_at:
    time.sleep(0.01)
pathlib.Path({note!r}).write_text(str(gate.exists()))
"""


def test_a_long_call_does_not_wait_for_its_process_to_start(tmp_path: Path) -> None:
    gate, note = tmp_path / "gate", tmp_path / "note"
    script = SLOW_START.format(gate=str(gate), note=str(note), patience_s=scaled(30))
    (tmp_path / "sitecustomize.py").write_text(script)

    async def call() -> object:
        pool = ProcessPool(1, {**os.environ, "PYTHONPATH": str(tmp_path)})
        long = "x" * 1_000_000
        asked = asyncio.create_task(pool.call(functions.is_equal, long, long))
        await asyncio.sleep(0.1)
        gate.touch()  # the process starts once the loop has come this far
        try:
            return await asked
        finally:
            pool.close_idle_workers()

    assert asyncio.run(call()) == 1.0
    assert note.read_text() == "True"
