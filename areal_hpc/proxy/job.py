"""Proxy process of a cell: replay the journal, listen, publish the address, serve until stopped."""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node import get_advertised_host
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.proxy.config import ProxyJobConfig
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import CellReplicaSource
from areal_hpc.proxy.service import LISTEN_BACKLOG, ProxyService, run_in_uvloop_thread
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.sealing import TicketSealer
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key
from areal_hpc.rundir.telemetry.prometheus import register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.trajectory import read_mixture_shape

log = logging.getLogger(__name__)

LAST_SEAL_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 1
"""Short, because a preempted job has little time and needs most of it for the last seal."""


def run(config: dict[str, Any]) -> None:
    job = ProxyJobConfig.model_validate(config)
    stop = StopRequest.install()
    run_in_uvloop_thread(_serve_cell(job, stop))


async def _serve_cell(job: ProxyJobConfig, stop: StopRequest) -> None:
    paths, recipe = RunPaths(job.run_dir), job.recipe
    admin_key = rendezvous.ensure_admin_key(paths.admin_key)
    service_key = rendezvous.read_service_key(paths.service_key)
    name = rendezvous.format_proxy_name(job.cell)
    model = ServedModel.from_model_dir(
        recipe.experiment_name,
        job.model_path,
        recipe.inference.context_length,
        recipe.inference.tool_call_parser,
        recipe.inference.reasoning_parser,
    )
    if recipe.trainer.router_replay:
        model = replace(model, mixture=read_mixture_shape(job.model_path))
    journal = make_journal_path(job, admin_key)
    recorder = JournaledRecorder(journal, model.encoder.vocab_size)
    sealer = TicketSealer(recorder, paths, job.cell, recipe.shards, service_key)
    sealer.recover_interrupted_seals()
    source = CellReplicaSource(paths.rendezvous_dir, job.cell, service_key)
    service = ProxyService(
        job.proxy_limits,
        model,
        job.serve_python,
        admin_key,
        recorder,
        source,
        sealer,
        driver_key=derive_bearer_key(service_key, name),
        metrics_key=rendezvous.ensure_metrics_key(paths.metrics_key),
        online=recipe.rollout.agent.mode == "online",
        trains_people=recipe.rollout.agent.train_on == "people",
    )
    register_sample_reader(service.metrics.list_samples)
    listener = _reopen_listener(paths.rendezvous_dir, name)
    host, port = listener.getsockname()[:2]
    try:
        rendezvous.publish_endpoint(paths.rendezvous_dir, name, f"http://{host}:{port}")
        record_state_entry("serve")
        log.info("%s listens on %s:%d", name, host, port)
        await service.run(listener, stop, DRAIN_TIMEOUT_S)
        with contextlib.suppress(TimeoutError, ClusterError):
            await asyncio.wait_for(sealer.seal_all(), LAST_SEAL_TIMEOUT_S)
    finally:
        await service.close()
    rendezvous.remove_own_endpoint(paths.rendezvous_dir, name)
    store = recorder.store
    if paths.finished_marker.exists() and not (store.finished or store.apart or store.sealed):
        shutil.rmtree(recorder.folder)  # the run has finished: no proxy reads the journal again


def _reopen_listener(directory: Path, service_name: str) -> socket.socket:
    """Listen on the port of the cell's crashed proxy if there was one, or on any free port.

    An agent keeps the address of its proxy; its client repeats calls that lost their connection.
    """
    host = get_advertised_host()
    previous = rendezvous.find_endpoint(directory, service_name)
    ports = [0]
    if previous is not None and urlsplit(previous.url).hostname == host:
        ports.insert(0, urlsplit(previous.url).port or 0)
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=LISTEN_BACKLOG)
        except OSError as error:
            log.warning("cannot listen on %s:%d: %s", host, port, error)
    raise ClusterError(
        f"no port of {host} is free", hint="set AREAL_HPC_HOST to an address of this host"
    )


def make_journal_path(job: ProxyJobConfig, run_secret: str) -> Path:
    """Return the path of the cell's journal, in a node-local folder that only its owner can read.

    The secret of the run directory is part of it, so that a run that starts anew at an earlier
    run's path does not take over that one's journal.
    """
    base = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    run = f"{job.run_dir.resolve()}\n{job.cell}\n{run_secret}".encode()
    folder = base / f"areal_hpc-{hashlib.blake2b(run, digest_size=8).hexdigest()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ClusterError(f"{folder} belongs to another user", hint="set TMPDIR")
    return folder / "journal"
