"""Prometheus metrics of the proxy."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.sessions.store import SessionStore
from areal_hpc.rundir.telemetry.prometheus import PrometheusSample
from areal_hpc.wire.trajectory import PromptReuse

log = logging.getLogger(__name__)

MAX_LOGGED_KINDS = 1000
"""Limit on the names from clients that are logged, and on those with a counter of their own."""
MAX_NAME_CHARS = 100
"""Length to which names from clients are cut; no parameter has a longer one."""
_INDEX_PATTERN = re.compile(r"\[\d+\]")


class ProxyMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prompts = self._make_counter(
            "prompts", "Model calls by token reuse of their prompt.", "reuse"
        )
        reuses: tuple[PromptReuse, ...] = ("none", "reused", "retokenized")
        self.prompts_by_reuse = {reuse: prompts.labels(reuse) for reuse in reuses}
        self.rewritten_histories = self._make_counter(
            "rewritten_histories",
            "Model calls whose history differs from the recorded one, by the first difference.",
            "reason",
        )
        self.failovers = self._make_counter(
            "failovers", "Replies continued on another replica after one was lost."
        )
        self.failed_calls = self._make_counter(
            "failed_calls", "Model calls given up because engines failed at each try of them."
        )
        self._refusals = self._make_counter(
            "refusals", "Requests answered with an error.", "route", "status"
        )
        self._ignored = self._make_counter(
            "ignored_parameters",
            "Requests by the parameters in them that have no effect.",
            "route",
            "parameter",
        )
        self._logged: set[tuple[object, ...]] = set()
        self._ignored_names: set[str] = set()

    def _make_counter(self, metric_name: str, text: str, *labels: str) -> Counter:
        return Counter(f"areal_hpc_proxy_{metric_name}", text, labels, registry=self._registry)

    def register_gauges(self, store: SessionStore) -> None:
        """Add gauges of a store, computed whenever the metrics are read."""

        def add_gauge(metric_name: str, text: str, count: Callable[[], int]) -> None:
            gauge = Gauge(f"areal_hpc_proxy_{metric_name}", text, registry=self._registry)
            gauge.set_function(count)

        sessions, finished = store.sessions, store.finished
        add_gauge(
            "sessions",
            "Sessions, ended ones that are not sealed included.",
            lambda: len(sessions),
        )
        add_gauge(
            "requests_in_flight",
            "Model calls in flight.",
            lambda: sum(session.in_flight for session in sessions.values()),
        )
        add_gauge(
            "unsealed_tickets", "Finished tickets that are not sealed yet.", lambda: len(finished)
        )

    def count_ignored_parameters(self, route: str, client: str, names: Iterable[str]) -> None:
        """Count a request's parameters without effect, each by its name up to a limit of names."""
        for name in (full_name[:MAX_NAME_CHARS] for full_name in names):
            text = "%s: %r has no effect here; client %r; it is counted from now on"
            self._log_once((client, route, name), text, route, name, client)
            if len(self._ignored_names) < MAX_LOGGED_KINDS:
                self._ignored_names.add(name)
            label = name if name in self._ignored_names else "others"
            self._ignored.labels(route, label).inc()

    def count_refusal(self, route: str, client: str, refusal: ProxyRequestError) -> None:
        self._refusals.labels(route, refusal.status).inc()
        parameter = _INDEX_PATTERN.sub("[]", (refusal.param or "")[:MAX_NAME_CHARS])
        suffix = f" for {parameter!r}" if parameter else ""
        text = "%s: client %r gets status %d%s: %.300r; it is counted from now on"
        kind = (route, client, refusal.status, suffix)
        self._log_once(kind, text, *kind, refusal.message)

    def _log_once(self, kind: tuple[object, ...], text: str, *values: object) -> None:
        if kind not in self._logged and len(self._logged) < MAX_LOGGED_KINDS:
            self._logged.add(kind)
            log.info(text, *values)

    def list_samples(self) -> Iterator[PrometheusSample]:
        for metric in self._registry.collect():
            for sample in metric.samples:
                yield PrometheusSample(sample.name, sample.value, sample.labels)

    def render(self) -> bytes:
        return generate_latest(self._registry)
