import dataclasses

from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.publisher import MAX_URGENT_RETRY_PAUSE_S, MIN_RETRY_PAUSE_S, UpdateBackoff

GOOD = ReplicaKey("cell-0", 0, 1, 1, "http://relay", 0.0)
BAD = dataclasses.replace(GOOD, index=1)
RESTARTED = dataclasses.replace(BAD, incarnation=2)


def failed(times: int, *, cost_s: float) -> tuple[UpdateBackoff, float]:
    """A back-off that saw BAD fail so often, and the time of the last failure."""
    backoff, now = UpdateBackoff(), 0.0
    for _ in range(times):
        now += 10_000
        backoff.record_update([GOOD], [BAD], now, cost_s)
    return backoff, now


def test_a_first_failure_is_tried_again_at_once() -> None:
    backoff, now = failed(1, cost_s=300)
    assert backoff.filter_retryable([GOOD, BAD], now) == [GOOD]
    assert backoff.filter_retryable([GOOD, BAD], now + MIN_RETRY_PAUSE_S) == [GOOD, BAD]


def test_later_tries_take_a_shrinking_share_of_the_time() -> None:
    for times, pause_s in ((2, 20.0), (3, 40.0), (4, 80.0)):
        backoff, now = failed(times, cost_s=10)
        assert backoff.filter_retryable([BAD], now + pause_s - 0.1) == []
        assert backoff.filter_retryable([BAD], now + pause_s) == [BAD]


def test_a_restarted_replica_does_not_wait_for_what_its_predecessor_cost() -> None:
    backoff, now = failed(3, cost_s=300)
    assert backoff.filter_retryable([BAD, RESTARTED], now + 4 * MIN_RETRY_PAUSE_S) == [RESTARTED]


def test_a_success_forgives_all() -> None:
    backoff, now = failed(5, cost_s=300)
    backoff.record_update([BAD], [], now, 0.1)
    assert backoff.filter_retryable([BAD], now) == [BAD]


def test_nobody_waits_long_while_no_replica_has_the_weights() -> None:
    backoff, now = failed(9, cost_s=300)
    later = now + MAX_URGENT_RETRY_PAUSE_S
    assert backoff.filter_retryable([BAD], later) == []
    assert backoff.filter_retryable([BAD], later, is_urgent=True) == [BAD]
