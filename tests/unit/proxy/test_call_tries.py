"""When a call has been tried often enough."""

import pytest

from areal_hpc.errors import RepeatedlyFailedCallError
from areal_hpc.proxy.engine.failover import MAX_ENGINE_FAILURES_PER_CALL, CallTries
from areal_hpc.proxy.engine.generation import (
    EngineHungUpError,
    EngineResponseError,
    UnfinishedEngineCallError,
)
from areal_hpc.wire.replicas import ReplicaView


def replica(index: int, incarnation: int = 1) -> ReplicaView:
    return ReplicaView(index, incarnation, "serving", "http://127.0.0.1:1")


def test_errors_of_engines_end_a_call_at_the_third() -> None:
    tries = CallTries()
    for index in range(MAX_ENGINE_FAILURES_PER_CALL - 1):
        tries.count_lost_try_or_raise(replica(index), EngineResponseError("500"))
    with pytest.raises(RepeatedlyFailedCallError, match="3 tries of this call failed: 500"):
        tries.count_lost_try_or_raise(replica(0), EngineResponseError("500"))


@pytest.mark.parametrize("second", [replica(1), replica(0, incarnation=2)])
def test_no_third_replica_is_asked_when_two_have_hung_up(second: ReplicaView) -> None:
    tries = CallTries()
    tries.count_lost_try_or_raise(replica(0), EngineHungUpError("gone"))
    assert tries.lost == {0}
    with pytest.raises(RepeatedlyFailedCallError, match="2 replicas hung up on this call"):
        tries.count_lost_try_or_raise(second, EngineHungUpError("gone"))


def test_what_no_engine_has_received_is_not_counted() -> None:
    tries = CallTries()
    for index in range(10):
        tries.count_lost_try_or_raise(replica(index), UnfinishedEngineCallError("no connection"))
    assert tries.lost == {*range(10)}
