"""`RolloutWorkflow`: an agent that records its own model calls."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from areal_hpc.errors import AgentError
from areal_hpc.session.tree import Interaction
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.proxy import EngineAddress, RecordCallsReply, RecordCallsRequest

RECORD_TIMEOUT_S = 60.0
MAX_RECORD_BATCH_BYTES = 4 << 20
"""Of interactions in one request, unless one alone is larger: the proxy refuses requests of more
than `max_request_bytes`, and sampling masks take up to 22 KB a token."""


class RolloutWorkflow(ABC):
    """AReaL's other kind of agent; `rollout.agent.mode` must be `inline`.

    Its clients have passed rewards back themselves, so `trainer.objective.credit` does not count.
    """

    @abstractmethod
    async def arun_episode(self, engine: EngineAddress, data: dict[str, Any]) -> Any:
        """Work on one task.

        Args:
            engine: For `ArealOpenAI(engine=...)`.
            data: One line of the task set.

        Returns:
            What `ArealOpenAI.export_interactions` returns, of one client or of several merged; None
            or nothing if the episode came to nothing.
        """

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, Reward]:
        """Run the episode and hand over what its clients recorded: what a driver calls.

        Raises:
            AgentError: There is nothing that could be trained.
        """
        if "base_url" not in extra_kwargs:
            raise AgentError(
                "a RolloutWorkflow runs within the driver", hint="set rollout.agent.mode=inline"
            )
        url = extra_kwargs["base_url"].removesuffix("/v1")
        key = extra_kwargs["api_key"]
        exported = await self.arun_episode(EngineAddress(url, key), data)
        if not exported:
            raise AgentError(f"arun_episode returned {exported!r}, expected exported interactions")
        interactions = _list_row_interactions(exported)
        client = AsyncWireClient(url, timeout_s=RECORD_TIMEOUT_S)
        try:
            for batch in _iterate_record_batches(interactions):
                await client.call(
                    "/rl/record", RecordCallsRequest(batch), RecordCallsReply, key=key
                )
        finally:
            await client.close()
        return {name: _build_reward(one) for name, one in exported.items()}


def _list_row_interactions(exported: object) -> list[Interaction]:
    rows: list[Any] = list(exported.values()) if isinstance(exported, Mapping) else [exported]
    if not all(hasattr(row, "plan") for row in rows):
        raise AgentError(
            f"arun_episode returned {exported!r:.200}, expected what export_interactions returns"
        )
    found = {one.interaction_id: one for row in rows for one in row.plan.path}
    # A replica of the client's counting is none of the cell's.
    return [msgspec.structs.replace(one, reward=None, replica=-1) for one in found.values()]


def _iterate_record_batches(interactions: Iterable[Interaction]) -> Iterator[list[msgspec.Raw]]:
    batch: list[msgspec.Raw] = []
    size_bytes = 0
    for one in interactions:
        encoded = msgspec.json.encode(one)
        if batch and size_bytes + len(encoded) > MAX_RECORD_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(msgspec.Raw(encoded))
        size_bytes += len(encoded)
    if batch:
        yield batch


def _build_reward(row: Any) -> Reward:
    given: Reward = row.plan.path[-1].given_reward or Reward(0.0)
    return msgspec.structs.replace(given, value=row.reward or 0.0)
