"""Which trainer ranks send weights, and to whom."""

from collections.abc import Sequence

import pytest

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.publisher import ReplicaSenderAssigner, choose_sender_ranks


def replicas(count: int, incarnation: int = 0) -> list[ReplicaKey]:
    return [ReplicaKey("cell-0", index, incarnation, 1, "", 0.0) for index in range(count)]


@pytest.mark.parametrize(
    ("nodes", "senders", "expected"),
    [
        ([0], None, [0]),
        ([0, 0, 0, 0], None, [0]),
        ([0, 0, 1, 1], None, [0, 2]),
        ([0, 1, 0, 1], None, [0, 1]),
        ([0, 0, 1, 1], 1, [0]),
        ([0, 0, 1, 1], 3, [0, 2, 1]),
        ([0, 0], 2, [0, 1]),
    ],
)
def test_senders_are_spread_over_nodes(
    nodes: Sequence[int], senders: int | None, expected: list[int]
) -> None:
    assert choose_sender_ranks(nodes, WeightsConfig(senders=senders)) == expected


def test_by_disk_one_rank_writes() -> None:
    assert choose_sender_ranks([0, 1], WeightsConfig(transport="disk")) == [0]


def test_replicas_are_divided_evenly_and_stay_with_their_sender() -> None:
    assigner = ReplicaSenderAssigner(2)
    first = assigner.assign(replicas(5))
    assert [len(share) for share in first] == [3, 2]
    restarted = replicas(5, incarnation=1)
    for key in restarted:
        shares = assigner.assign([key])
        sender = next(at for at, share in enumerate(shares) if share)
        assert key.cell_and_index in [one.cell_and_index for one in first[sender]]
    late = ReplicaKey("cell-1", 0, 0, 1, "", 0.0)
    assert assigner.assign([late]) == [[], [late]], "the sender with fewer gets the new one"


def test_there_are_senders_without_a_replica() -> None:
    assert ReplicaSenderAssigner(3).assign(replicas(1)) == [replicas(1), [], []]
