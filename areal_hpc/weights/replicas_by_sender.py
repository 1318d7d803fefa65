"""Division of the replicas over the trainer ranks that send weights. Pure."""

from collections import Counter
from collections.abc import Sequence

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.discovery import ReplicaKey

ReplicasBySender = list[list[ReplicaKey]]
"""The replicas of an update by sender; a sender may have none."""


def choose_sender_ranks(node_of_rank: Sequence[int], config: WeightsConfig) -> list[int]:
    """The trainer ranks that send, rank 0 first: the first of each node, then the second of each.

    As many as `weights.senders` says, else as trainer nodes; from disk replicas read by themselves.
    """
    if config.transport == "disk":
        return [0]
    seen: Counter[int] = Counter()
    places: list[tuple[int, int]] = []
    for rank, node in enumerate(node_of_rank):
        places.append((seen[node], rank))
        seen[node] += 1
    return [rank for _, rank in sorted(places)[: config.senders or len(seen)]]


class ReplicaSenderAssigner:
    """Gives each replica to a sender, which has it in every update: it holds the process group."""

    def __init__(self, senders: int) -> None:
        self._senders = senders
        self._sender_of: dict[tuple[str, int], int] = {}

    def assign(self, replicas: Sequence[ReplicaKey]) -> ReplicasBySender:
        """The replicas of one update. A new one goes to the sender that has the fewest by now."""
        replicas_by_sender: ReplicasBySender = [[] for _ in range(self._senders)]
        for key in sorted(replicas, key=lambda key: key.cell_and_index):
            if key.cell_and_index not in self._sender_of:
                held = Counter(self._sender_of.values())
                fewest = min(range(self._senders), key=lambda sender: held[sender])
                self._sender_of[key.cell_and_index] = fewest
            replicas_by_sender[self._sender_of[key.cell_and_index]].append(key)
        return replicas_by_sender
