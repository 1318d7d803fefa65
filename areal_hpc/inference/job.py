"""Inference process of one cell: SGLang replicas behind one control proxy."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx

from areal_hpc.inference.config import InferenceJobConfig, build_server_command, get_server_log_dir
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.replica import Replica
from areal_hpc.inference.server.sglang_server import STOP_GRACE_S
from areal_hpc.inference.server_traces import ServerTraces
from areal_hpc.jobs.node import get_advertised_host
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.jobs.restarts import RestartPolicy
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import BackgroundEventLog
from areal_hpc.rundir.telemetry.prometheus import PrometheusSample, register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

REPLICA_POLL_S = 0.1
METRICS_TIMEOUT_S = 2.0
"""Timeout of a server's metrics; a slower server is left out of the scrape."""


def run(config: dict[str, Any]) -> None:
    job = InferenceJobConfig.model_validate(config)
    paths, inference = RunPaths(job.run_dir), job.recipe.inference
    stop = StopRequest.install()
    events = BackgroundEventLog(paths.events, job.cell)
    clock = AwakeClock()
    replicas = [
        Replica(
            index,
            inference,
            launch=partial(build_server_command, job, index),
            log_dir=get_server_log_dir(job, paths),
            events=events,
            policy=RestartPolicy(inference.max_restarts),
            clock=clock,
            loaded_version=job.loaded_version,
        )
        for index in range(inference.replicas_per_cell)
    ]
    service_key = rendezvous.read_service_key(paths.service_key)
    app = ControlProxyApp(job.cell, replicas, service_key, paths.published_weights_dir)
    control_proxy = ControlProxyServer(app, get_advertised_host(), paths.service_key)
    control_proxy.start()
    service = rendezvous.format_control_proxy_name(job.cell)
    rendezvous.publish_endpoint(paths.rendezvous_dir, service, control_proxy.url)
    if job.recipe.cluster.prometheus:
        register_sample_reader(lambda: read_replica_samples(replicas))
    profile = job.recipe.trainer.profile
    traces = None
    if profile and profile.server_seconds and inference.nodes_per_replica == 1:
        traces = ServerTraces(profile, paths, job.cell)
    record_state_entry("serve")
    try:
        while not stop.requested:
            for replica in replicas:
                replica.maintain_server_once()
                if traces is not None:
                    traces.begin_due_trace(replica)
            stop.wait(REPLICA_POLL_S)
    finally:
        rendezvous.remove_own_endpoint(paths.rendezvous_dir, service)
        for replica in replicas:
            replica.request_stop()
        kill_at = time.monotonic() + STOP_GRACE_S
        for replica in replicas:
            replica.kill(max(0.0, kill_at - time.monotonic()))
        control_proxy.stop()
        events.close()


def read_replica_samples(replicas: Sequence[Replica]) -> Iterator[PrometheusSample]:
    """Read state, starts and weights of each replica, and the metrics of its server."""
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
    """Read the metrics of a replica's server; none if they cannot be read.

    The server listens on loopback only, so the site's Prometheus reads them from this process.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        response = httpx.get(
            f"{view.url}/metrics", timeout=METRICS_TIMEOUT_S, trust_env=False, verify=False
        )
        families = list(text_string_to_metric_families(response.raise_for_status().text))
    except (httpx.HTTPError, ValueError):  # it is ending, or too busy
        return
    for family in families:
        for sample in family.samples:
            labels = {**sample.labels, "replica": str(view.index)}
            yield PrometheusSample(sample.name, sample.value, labels)
