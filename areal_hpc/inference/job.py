"""The inference process of one cell: SGLang replicas behind one control proxy."""

import time
from functools import partial
from typing import Any

from areal_hpc.inference.config import InferenceJobConfig, build_server_command, get_server_log_dir
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.replica import Replica
from areal_hpc.inference.server.sglang_server import STOP_GRACE_S
from areal_hpc.jobs.node.topology import get_advertised_host
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.jobs.restart_policy import RestartPolicy
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import BackgroundEventLog
from areal_hpc.rundir.telemetry.process_metrics import register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.awake_clock import AwakeClock

REPLICA_POLL_S = 0.1


def run(config: dict[str, Any]) -> None:
    """Serve until told to stop."""
    job = InferenceJobConfig.model_validate(config)
    paths = RunPaths(job.run_dir)
    stop = StopRequest.install()
    events = BackgroundEventLog(paths.events, job.cell)
    clock = AwakeClock()
    replicas = [
        Replica(
            index,
            job.inference,
            launch=partial(build_server_command, job, index),
            log_dir=get_server_log_dir(job, paths),
            events=events,
            policy=RestartPolicy(job.inference.max_restarts),
            clock=clock,
            loaded_version=job.loaded_version,
        )
        for index in range(job.inference.replicas_per_cell)
    ]
    service_key = rendezvous.read_service_key(paths.service_key)
    app = ControlProxyApp(job.cell, replicas, service_key, paths.published_weights_dir)
    control_proxy = ControlProxyServer(app, get_advertised_host(), paths.service_key)
    control_proxy.start()
    service = rendezvous.format_control_proxy_name(job.cell)
    rendezvous.publish_endpoint(paths.rendezvous_dir, service, control_proxy.url)
    if job.serves_metrics:
        from areal_hpc.inference.replica_metrics import read_replica_samples

        register_sample_reader(lambda: read_replica_samples(replicas))
    record_state_entry("serve")
    try:
        while not stop.requested:
            for replica in replicas:
                replica.maintain_server_once()
            stop.wait(REPLICA_POLL_S)
    finally:
        rendezvous.remove_own_endpoint(paths.rendezvous_dir, service)
        for replica in replicas:
            replica.request_stop()
        gone_by = time.monotonic() + STOP_GRACE_S
        for replica in replicas:
            replica.kill(max(0.0, gone_by - time.monotonic()))
        control_proxy.stop()
        events.close()
