"""Metrics of a cell's replicas, those of their SGLang servers included.

The servers listen on loopback alone, so a Prometheus of the site reaches them through this process.
"""

from collections.abc import Iterator, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from areal_hpc.inference.replica import Replica
from areal_hpc.rundir.telemetry.process_metrics import PrometheusSample
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

SERVER_TIMEOUT_S = 2.0
"""A server that answers later is left out of the scrape."""


def read_replica_samples(replicas: Sequence[Replica]) -> Iterator[PrometheusSample]:
    """State, starts and weights of each replica, and what its server tells of itself."""
    for replica in replicas:
        view = replica.build_view()
        labels = {"replica": str(view.index)}
        yield PrometheusSample("areal_hpc_replica_serving", float(view.state == "serving"), labels)
        yield PrometheusSample("areal_hpc_replica_incarnation", view.incarnation, labels)
        if view.version:
            step = WeightVersion.parse(view.version).step
            yield PrometheusSample("areal_hpc_replica_weight_step", step, labels)
        if view.state == "serving":
            yield from read_server_samples(view)


def read_server_samples(view: ReplicaView) -> Iterator[PrometheusSample]:
    """What a replica's server tells of itself; nothing if it cannot be read."""
    try:
        answer = httpx.get(
            f"{view.url}/metrics", timeout=SERVER_TIMEOUT_S, trust_env=False, verify=False
        )
        families = list(text_string_to_metric_families(answer.raise_for_status().text))
    except (httpx.HTTPError, ValueError):  # it is ending, or too busy
        return
    for family in families:
        for one in family.samples:
            yield PrometheusSample(one.name, one.value, {**one.labels, "replica": str(view.index)})
