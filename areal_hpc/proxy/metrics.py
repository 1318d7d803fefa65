"""What the proxy counts, in Prometheus' text format."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from areal_hpc.proxy.prompts import Drift
from areal_hpc.proxy.sessions import SessionBook

log = logging.getLogger(__name__)

PREFIX = "areal_hpc_proxy_"


class IgnoredParameters:
    """How often requests gave parameters that have no effect, by route and name."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, route: str, names: Iterable[str]) -> None:
        """Count what one request gave. The log hears of each parameter once."""
        for name in names:
            if (route, name) not in self.counts:
                log.info("%s: %s has no effect here; it is counted from now on", route, name)
            self.counts[route, name] += 1


def exposition(book: SessionBook, drift: Drift, resumed: int, ignored: IgnoredParameters) -> bytes:
    """The body of GET /metrics."""
    sessions = book.sessions.values()
    in_flight = sum(session.in_flight for session in sessions)
    lines = [
        *_family("sessions", "gauge", "Sessions held in memory.", {"": len(sessions)}),
        *_family("requests_in_flight", "gauge", "Model calls being answered.", {"": in_flight}),
        *_family("unsealed_tickets", "gauge", "Finished, not sealed.", {"": len(book.finished)}),
        *_family(
            "prompts_total",
            "counter",
            "Model calls by how their prompt was made.",
            _labelled("splice", {"root": 0, "spliced": 0, "retokenised": 0, **drift.splices}),
        ),
        *_family(
            "forks_total",
            "counter",
            "Model calls whose history was rewritten, by the first difference.",
            _labelled("reason", drift.forks),
        ),
        *_family(
            "resumptions_total",
            "counter",
            "Times a replica went on from what a lost one had said.",
            {"": resumed},
        ),
        *_family(
            "ignored_parameters_total",
            "counter",
            "Requests by the parameters in them that have no effect.",
            {
                f'{{route="{route}",parameter="{name}"}}': count
                for (route, name), count in ignored.counts.items()
            },
        ),
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(label: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{value}"}}': count for value, count in counts.items()}


def _family(name: str, kind: str, text: str, samples: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in samples.items():
        yield f"{PREFIX}{name}{labels} {value}"
