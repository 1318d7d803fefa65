import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.loop.weight_senders import WeightSenders, choose_sender_ranks
from areal_hpc.weights.broadcast import choose_group_size, partition_replicas
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.publisher import (
    MAX_URGENT_RETRY_PAUSE_S,
    Publisher,
    UpdateBackoff,
)
from areal_hpc.weights.replicas import ReplicaKey
from areal_hpc.weights.update import (
    PROBE_TOKENS,
    Probe,
    check_probe,
    choose_probe_ids,
    get_max_probe_gap,
)
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.weight_updates import WITHOUT_MODEL, publishing

SPECS = [TensorSpec(f"norm.{at}.weight", (4,), "float32") for at in range(5)]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with publishing(tmp_path, cells=2) as publisher:
        yield publisher


def test_the_export_is_drained_even_when_nobody_listens(publisher: Publisher) -> None:
    exported: list[str] = []

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in SPECS:
            exported.append(spec.name)
            yield spec.name, torch.zeros(4)

    report = publisher.transport.update(WeightVersion(1, 0), SPECS, parameters(), [], WITHOUT_MODEL)
    assert exported == [spec.name for spec in SPECS]
    assert (report.ok, report.failed) == ((), {})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["norm.0.weight"], "ended before"),
        ([*(spec.name for spec in SPECS), "extra.weight", "more.weight"], "got extra"),
        (["extra.weight", "more.weight"], "got extra"),
    ],
)
def test_an_export_that_is_not_as_promised_is_drained_and_refused(
    publisher: Publisher, names: list[str], message: str
) -> None:
    arrivals = ((name, torch.zeros(4)) for name in names)
    with pytest.raises(WeightSyncError, match=message):
        publisher.transport.update(WeightVersion(1, 0), SPECS, arrivals, [], WITHOUT_MODEL)
    assert next(arrivals, None) is None


def test_a_replica_that_failed_is_updated_alone_so_that_it_fails_nobody_else() -> None:
    keys = [ReplicaKey(f"cell-{at}", 0, 1, 1, "", 0.0) for at in range(5)]
    groups = partition_replicas([*reversed(keys)], 2, {("cell-1", 0), ("cell-9", 0)})
    assert groups == [(keys[0], keys[2]), (keys[3], keys[4]), (keys[1],)]


@pytest.mark.parametrize(
    ("backend", "replicas", "size"),
    [("gloo", 32, 1), ("nccl", 1, 1), ("nccl", 4, 1), ("nccl", 5, 2), ("nccl", 32, 8)],
)
def test_gpus_form_few_groups_and_cpus_one_for_each_replica(
    backend: str, replicas: int, size: int
) -> None:
    assert choose_group_size(backend, replicas) == size


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


def test_replicas_are_divided_evenly_and_stay_with_their_sender() -> None:
    assigner = WeightSenders(0, 2, SPECS, None)
    first = assigner.assign(replicas(5))
    assert [len(share) for share in first] == [3, 2]
    restarted = replicas(5, incarnation=1)
    for key in restarted:
        shares = assigner.assign([key])
        sender = next(at for at, share in enumerate(shares) if share)
        assert key.cell_and_index in [one.cell_and_index for one in first[sender]]
    late = ReplicaKey("cell-1", 0, 0, 1, "", 0.0)
    assert assigner.assign([late]) == [[], [late]], "the sender with fewer gets the new one"


GOOD = ReplicaKey("cell-0", 0, 1, 1, "http://relay", 0.0)
BAD = dataclasses.replace(GOOD, index=1)


def failed(times: int, *, cost_s: float) -> tuple[UpdateBackoff, float]:
    """A back-off that saw BAD fail so often, and the time of the last failure."""
    backoff, now = UpdateBackoff(), 0.0
    for _ in range(times):
        now += 10_000
        backoff.record_update([GOOD], [BAD], now, cost_s)
    return backoff, now


def test_later_tries_take_a_shrinking_share_of_the_time() -> None:
    for times, pause_s in ((2, 20.0), (3, 40.0), (4, 80.0)):
        backoff, now = failed(times, cost_s=10)
        assert backoff.filter_retryable([BAD], now + pause_s - 0.1) == []
        assert backoff.filter_retryable([BAD], now + pause_s) == [BAD]


def test_a_success_forgives_all() -> None:
    backoff, now = failed(5, cost_s=300)
    backoff.record_update([BAD], [], now, 0.1)
    assert backoff.filter_retryable([BAD], now) == [BAD]


def test_nobody_waits_long_while_no_replica_has_the_weights() -> None:
    backoff, now = failed(9, cost_s=300)
    later = now + MAX_URGENT_RETRY_PAUSE_S
    assert backoff.filter_retryable([BAD], later) == []
    assert backoff.filter_retryable([BAD], later, is_urgent=True) == [BAD]


PROBE = Probe([5, 6, 7], [-1.0, -2.0])


@pytest.mark.parametrize("vocab", [8, 300, 151_936])
def test_the_prompt_is_the_same_each_time_and_inside_the_vocabulary(vocab: int) -> None:
    ids = choose_probe_ids(vocab)
    assert ids == choose_probe_ids(vocab)
    assert len(ids) == PROBE_TOKENS
    assert all(0 <= token < vocab for token in ids)


def test_a_replica_with_a_short_context_is_judged_by_what_it_scored() -> None:
    check_probe(PROBE, [-1.0001], 1e-3, "replica 0")
    with pytest.raises(WeightSyncError, match="got none"):
        check_probe(PROBE, [], 1e-3, "replica 0")


@pytest.mark.parametrize("wrong", [-2.1, math.nan, -math.inf])
def test_what_differs_on_average_or_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(WeightSyncError, match="differ from the trainer"):
        check_probe(PROBE, [-1.0, wrong], 0.01, "replica 0")


def test_the_bound_is_that_of_the_type_that_rounds_most() -> None:
    specs = [TensorSpec("bias", (4,), "float32"), TensorSpec("weight", (4,), "bfloat16")]
    assert get_max_probe_gap(WeightsConfig(), specs[:1]) == 1e-3
    assert get_max_probe_gap(WeightsConfig(), specs) == 0.25
    assert get_max_probe_gap(WeightsConfig(max_probe_gap=0.5), specs) == 0.5
