"""Traces that SGLang's own profiler records before the steps of `trainer.profile`."""

import logging
import tempfile
import threading
import time
from pathlib import Path

import httpx

from areal_hpc.inference.replica import Replica
from areal_hpc.recipe.sections.trainer import ProfileConfig
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.http import build_key_header
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 120.0
"""Time for a server to write its trace; it serves nothing meanwhile."""


class ServerTraces:
    """Traces of a cell's servers, each from when it serves the weights before a chosen step.

    Servers write into a folder of their node, from where a thread moves the files: a server that
    wrote to shared storage would hang with it.
    """

    def __init__(self, config: ProfileConfig, paths: RunPaths, cell: str) -> None:
        self._config = config
        self._paths = paths
        self._cell = cell
        self._traced_steps: set[tuple[int, int]] = set()
        """Replica and step of every trace that was begun."""

    def begin_due_trace(self, replica: Replica) -> None:
        """Begin to trace a replica if the recipe names the step after the weights it serves."""
        view = replica.build_view()
        if not view.version:
            return
        step = WeightVersion.parse(view.version).step + 1
        if step in self._config.steps and (view.index, step) not in self._traced_steps:
            self._traced_steps.add((view.index, step))
            replica.is_traced = True
            threading.Thread(target=self._trace, args=(replica, view, step), daemon=True).start()

    def _trace(self, replica: Replica, view: ReplicaView, step: int) -> None:
        headers = build_key_header(view.keys.admin)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="sglang-trace-") as folder,
                httpx.Client(
                    base_url=view.url, headers=headers, timeout=_STOP_TIMEOUT_S, trust_env=False
                ) as client,
            ):
                request = {"output_dir": folder, "profile_id": f"{self._cell}-{view.index}"}
                client.post("/start_profile", json=request).raise_for_status()
                time.sleep(self._config.server_seconds)
                client.post("/stop_profile").raise_for_status()
                for source in sorted(Path(folder).iterdir()):
                    write_atomic(self._paths.profile(step, source.name), source.read_bytes())
        except (httpx.HTTPError, OSError) as error:
            log.warning("step %d: replica %d was not traced: %s", step, view.index, error)
        finally:
            replica.is_traced = False
