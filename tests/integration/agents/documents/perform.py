"""Run code blocks as a reader would: `python perform.py REPORT` in an agents' environment.

Reads an `Order` as `play.py` does; writes, for each block by its key, how it failed ("" for not at
all). Blocks of one document share their names, as the guide builds up.
"""

import ast
import asyncio
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import areal_hpc.areal.import_hook  # noqa: F401  the blocks import `areal`
from areal_hpc.rollout.agent import RolloutWorkflow, load_agent
from areal_hpc.rollout.execution.agent_pickle import save_agent_as_module
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import ExportSettings, SamplingDefaults, StartSessionRequest

if TYPE_CHECKING:
    from tests.integration.agents.play import Place, obey, play
else:  # some environments have a package `tests` of their own
    from play import Place, obey, play

TIMEOUT_S = 100.0 * float(os.environ.get("TESTS_SLOWNESS", "1"))
FAR_TOKENS = 1000
"""The Agents SDK takes a reply that reached its limit for an error; all end long before."""


class Part(msgspec.Struct):
    key: str
    before: str
    text: str
    after: str


class Order(Place):
    """Blocks, and the engine that they call."""

    engine: str
    model_dir: str
    first_ticket: int
    parts: list[Part]


class ModelFolder(str):
    """Model directory where transformers is not installed; our client reads the rest."""

    pad_token_id, eos_token_id = 0, 2


class Reader:
    """Namespace of the names that guides take for granted."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._tickets = iter(range(order.first_ticket, order.first_ticket + 1000))

    def names(self) -> dict[str, Any]:
        task = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "answer": "3"}
        return {
            "__name__": "__main__",  # a reader's script, so that its classes travel by value
            "asyncio": asyncio,
            "os": os,
            "engine": self._order.engine,
            "tokenizer": ModelFolder(self._order.model_dir),
            "data": task,
            "episode": self.episode,
            "subproc_episode": self.subproc_episode,
        }

    async def episode(self, workflow: Any) -> float:
        """Play one episode at the proxy as a driver does, and return the reward."""
        return await self._play(load_agent(workflow, {}))

    async def subproc_episode(self, workflow: Any) -> float:
        folder = RunPaths(Path(self._order.run_dir)).agent_dir
        sys.path.insert(0, str(folder))
        saved = save_agent_as_module(workflow, {}, folder, (), imports_areal_names=True)
        return await self._play(SubprocessAgent(saved, {}, 1))

    async def _play(self, agent: Any) -> float:
        session = StartSessionRequest(
            "document",
            TicketRef(next(self._tickets), 0),
            sampling=SamplingDefaults(max_new_tokens=FAR_TOKENS),
            seed=7,
            export=ExportSettings("individual", is_credited=True),
            records_calls=isinstance(agent, RolloutWorkflow),
        )
        outcome = await play(self._order, agent, session, self.names()["data"])
        assert outcome.status == "ok", outcome.reason
        return outcome.reward


async def execute(text: str, names: dict[str, Any], where: str) -> None:
    code = compile(text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(code, names)
    if inspect.iscoroutine(waiting):
        await waiting


async def perform(order: Order) -> dict[str, str]:
    """Run each block and return its failure."""
    reader = Reader(order)
    documents: dict[str, dict[str, Any]] = {}
    report = {}
    for part in order.parts:
        names = documents.setdefault(part.key.partition(":")[0], reader.names())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for text, where in (
                    (part.before, "before"),
                    (part.text, part.key),
                    (part.after, "after"),
                ):
                    await execute(text, names, where)
        except Exception:  # the report holds any error
            report[part.key] = traceback.format_exc()[-2500:]
        else:
            report[part.key] = ""
    return report


if __name__ == "__main__":
    obey(Order, perform)
