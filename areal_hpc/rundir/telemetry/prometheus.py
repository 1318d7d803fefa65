"""Prometheus endpoint of a process, and the file in the run directory that Prometheus finds it by.

Who reads shows the run's metrics key, unless the port is on loopback. There are numbers, with names
of nodes, jobs and parameters, and no text of a conversation. Nothing here may stop a run: what
cannot be served is told and left out.
"""

import contextlib
import hmac
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_metrics_key
from areal_hpc.rundir.telemetry.process_metrics import (
    PrometheusSample,
    SampleReader,
    list_sample_readers,
)

log = logging.getLogger(__name__)


@contextmanager
def serve_process_metrics(paths: RunPaths, job: str, process: str, host: str) -> Iterator[None]:
    """Within the context the process answers `GET /metrics` at a free port of `host`.

    Its processor time, memory and open files are there, and what roles have registered. The file of
    its target lies in `paths.prometheus_dir`. One whose process was killed stays until the process
    starts again: Prometheus then calls the target down, as it is.
    """
    target = paths.prometheus_target(f"{job}-{process}")
    registry = CollectorRegistry()
    registry.register(_SamplesCollector())
    with contextlib.ExitStack() as ends:
        try:
            key = "" if host.startswith("127.") else ensure_metrics_key(paths.metrics_key)
            server, _ = start_http_server(0, host, registry)
            ends.callback(server.server_close)
            ends.callback(server.shutdown)
            if key:
                server.set_app(_require_key(make_wsgi_app(registry), key))
            labels = {"run": paths.run_name, "job": job, "process": process}
            address = f"{host}:{server.server_port}"
            write_atomic(target, json.dumps([{"targets": [address], "labels": labels}]).encode())
            ends.callback(_remove_target_file, target)
        except (OSError, RecipeError) as error:
            log.warning("Prometheus cannot scrape this process: %s", error)
        yield


def _require_key(app: WSGIApplication, key: str) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if hmac.compare_digest(given, f"Bearer {key}".encode()):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b"show the key in rendezvous/metrics.key of the run directory\n"]

    return answer


def _remove_target_file(target: Path) -> None:
    with contextlib.suppress(OSError):
        target.unlink()


class _SamplesCollector(Collector):
    def collect(self) -> Iterable[Metric]:
        yield from REGISTRY.collect()
        found: dict[str, Metric] = {}
        for read in list_sample_readers():
            for sample in _read_or_log(read):
                name = sample.name.removesuffix("_total")
                kind = "gauge" if name == sample.name else "counter"
                metric = found.setdefault(sample.name, Metric(name, sample.name, kind))
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from found.values()

    def describe(self) -> Iterable[Metric]:
        return ()


def _read_or_log(read_samples: SampleReader) -> list[PrometheusSample]:
    try:
        return [*read_samples()]
    except Exception as error:  # boundary: what one role cannot tell must not cost the others
        log.warning("some metrics cannot be told to Prometheus: %r", error)
        return []
