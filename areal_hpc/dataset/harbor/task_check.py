"""Check of Harbor's tasks: the solution that comes with a task, and none, judged in sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.reward.harbor import HarborTask, find_harbor_task
from areal_hpc.sandbox.runtimes import Runtime
from areal_hpc.sandbox.spec import SandboxSpec
from areal_hpc.wire.agent_reward import Reward


@dataclass(frozen=True, slots=True)
class TaskCheck:
    name: str
    oracle: Reward | None
    """Of its own solution; None if it has none."""
    no_action_reward: Reward
    """Of doing nothing."""

    @property
    def has_discriminating_tests(self) -> bool:
        """The tests tell the solution from nothing, and give a verdict on both."""
        if self.oracle is None:
            return (
                not self.no_action_reward.metrics["no_verdict"] and self.no_action_reward.value < 1
            )
        verdicts = (self.oracle, self.no_action_reward)
        given = all(not one.metrics["no_verdict"] for one in verdicts)
        return given and self.oracle.value > self.no_action_reward.value


async def check_tasks_in_order(
    rows: Sequence[dict[str, Any]], runtime: Runtime, spec: SandboxSpec, at_once: int
) -> AsyncIterator[TaskCheck]:
    """Check each of these rows, in their order."""
    places = asyncio.Semaphore(at_once)

    async def check(row: dict[str, Any]) -> TaskCheck:
        async with places:
            return await judge_task(row, runtime, spec)

    running = [asyncio.create_task(check(row)) for row in rows]
    try:
        for one in running:
            yield await one
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def judge_task(row: dict[str, Any], runtime: Runtime, spec: SandboxSpec) -> TaskCheck:
    """Play one task twice, each time in a sandbox of its own."""
    task = find_harbor_task(row)
    assert task is not None
    has_solution = Path(task.folder, "solution", "solve.sh").is_file()
    oracle = await _play(task, runtime, spec, solves=True) if has_solution else None
    return TaskCheck(row["name"], oracle, await _play(task, runtime, spec, solves=False))


async def _play(task: HarborTask, runtime: Runtime, spec: SandboxSpec, *, solves: bool) -> Reward:
    sandbox = await runtime.start(task.apply_task_to_sandbox_spec(spec))
    try:
        await task.prepare(sandbox)
        if solves:
            await task.run_solution_script(sandbox)
        return await task.run_tests(sandbox)
    finally:
        await sandbox.stop()
