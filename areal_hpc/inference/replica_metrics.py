"""Metrics of a cell's replicas, those of their SGLang servers included.

The servers listen on loopback alone, so a Prometheus of the site reaches them through this process.
"""

import urllib.request
from collections.abc import Iterator, Sequence

from prometheus_client.parser import text_string_to_metric_families

from areal_hpc.inference.replica import Replica
from areal_hpc.rundir.telemetry.process_metrics import Sample
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

SERVER_TIMEOUT_S = 2.0
"""A server that answers later is left out of the scrape."""


def read_replica_samples(replicas: Sequence[Replica]) -> Iterator[Sample]:
    """State, starts and weights of each replica, and what its server tells of itself."""
    for replica in replicas:
        view = replica.build_view()
        labels = {"replica": str(view.index)}
        yield Sample("areal_hpc_replica_serving", float(view.state == "serving"), labels)
        yield Sample("areal_hpc_replica_incarnation", view.incarnation, labels)
        if view.version:
            step = WeightVersion.parse(view.version).step
            yield Sample("areal_hpc_replica_weight_step", step, labels)
        if view.state == "serving":
            yield from _read_server_samples(view)


def _read_server_samples(view: ReplicaView) -> Iterator[Sample]:
    try:
        with urllib.request.urlopen(f"{view.url}/metrics", timeout=SERVER_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError:  # it is ending, or too busy
        return
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            yield Sample(one.name, one.value, {**one.labels, "replica": str(view.index)})
