"""Prometheus endpoint of a process, and the file in the run directory by which Prometheus finds it.

A reader sends the run's metrics key unless the port is on loopback. The endpoint serves numbers
with names of nodes, jobs and parameters, and no text of a conversation. Errors here never stop a
run: they are logged, and the metrics are left out.
"""

import contextlib
import hmac
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_metrics_key

log = logging.getLogger(__name__)

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class PrometheusSample(NamedTuple):
    name: str
    """`areal_hpc_<role>_<quantity>`, with its unit; a counter ends in `_total`."""
    value: float
    labels: Mapping[str, str] = _NO_LABELS


SampleReader = Callable[[], Iterable[PrometheusSample]]
_readers: list[SampleReader] = []


def register_sample_reader(read_samples: SampleReader) -> None:
    """Register a function that each scrape calls, in a thread of its own."""
    _readers.append(read_samples)


def build_samples(prefix: str, values: Mapping[str, object]) -> Iterator[PrometheusSample]:
    """Yield a sample for each number: `reward/mean` becomes `<prefix>_reward_mean`."""
    for name, value in values.items():
        if isinstance(value, int | float):
            plain = "".join(char if char.isalnum() and char.isascii() else "_" for char in name)
            yield PrometheusSample(f"{prefix}_{plain}", value)


@contextmanager
def serve_process_metrics(paths: RunPaths, job: str, process: str, host: str) -> Iterator[None]:
    """Serve `GET /metrics` at a free port of `host` within the context.

    The endpoint has the process's processor time, memory and open files, and what roles registered.
    Its target's file lies in `paths.prometheus_dir`. After a kill the file stays until the process
    starts again, and Prometheus reports the target as down.
    """
    # Imported here: roles register their readers without it.
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

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


class _SamplesCollector:
    def collect(self) -> Iterable[Any]:
        from prometheus_client import REGISTRY
        from prometheus_client.core import Metric

        yield from REGISTRY.collect()
        metrics: dict[str, Metric] = {}
        for sample in (sample for read in _readers for sample in _read_samples_of(read)):
            name = sample.name.removesuffix("_total")
            kind = "gauge" if name == sample.name else "counter"
            metric = metrics.setdefault(sample.name, Metric(name, sample.name, kind))
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from metrics.values()

    def describe(self) -> Iterable[Any]:
        return ()


def _read_samples_of(read_samples: SampleReader) -> list[PrometheusSample]:
    try:
        return [*read_samples()]
    except Exception as error:  # boundary: an error of one reader must not cost the other metrics
        log.warning("some metrics cannot be served to Prometheus: %r", error)
        return []
