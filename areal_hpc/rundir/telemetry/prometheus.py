"""Prometheus endpoint of a process, and the file in the run directory that Prometheus finds it by.

Who reads shows the run's metrics key, unless the port is on loopback. There are numbers, with names
of nodes, jobs and parameters, and no text of a conversation. Nothing here may stop a run: what
cannot be served is told and left out.
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
    """`areal_hpc_<role>_<what>`, with its unit; one that ends in `_total` only grows."""
    value: float
    labels: Mapping[str, str] = _NO_LABELS


SampleReader = Callable[[], Iterable[PrometheusSample]]
_readers: list[SampleReader] = []


def register_sample_reader(read_samples: SampleReader) -> None:
    """Have `read_samples` called, in a thread of its own, whenever the process is asked."""
    _readers.append(read_samples)


def build_samples(prefix: str, values: Mapping[str, object]) -> Iterator[PrometheusSample]:
    """A sample for each value that is a number: `reward/mean` becomes `<prefix>_reward_mean`."""
    for name, value in values.items():
        if isinstance(value, int | float):
            plain = "".join(one if one.isalnum() and one.isascii() else "_" for one in name)
            yield PrometheusSample(f"{prefix}_{plain}", value)


@contextmanager
def serve_process_metrics(paths: RunPaths, job: str, process: str, host: str) -> Iterator[None]:
    """Within the context the process answers `GET /metrics` at a free port of `host`.

    Its processor time, memory and open files are there, and what roles have registered. The file of
    its target lies in `paths.prometheus_dir`. One whose process was killed stays until the process
    starts again: Prometheus then calls the target down, as it is.
    """
    # Roles register what they tell without it.
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
        found: dict[str, Metric] = {}
        for sample in (one for read in _readers for one in _read_samples_of(read)):
            name = sample.name.removesuffix("_total")
            kind = "gauge" if name == sample.name else "counter"
            metric = found.setdefault(sample.name, Metric(name, sample.name, kind))
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from found.values()

    def describe(self) -> Iterable[Any]:
        return ()


def _read_samples_of(read_samples: SampleReader) -> list[PrometheusSample]:
    try:
        return [*read_samples()]
    except Exception as error:  # boundary: what one role cannot tell must not cost the others
        log.warning("some metrics cannot be told to Prometheus: %r", error)
        return []
