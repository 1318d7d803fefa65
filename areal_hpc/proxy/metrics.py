"""What the proxy counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_hpc.proxy.prompts import Drift
from areal_hpc.proxy.sessions import SessionBook

PREFIX = "areal_hpc_proxy_"


def exposition(book: SessionBook, drift: Drift, resumed: int) -> bytes:
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
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(label: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{value}"}}': count for value, count in counts.items()}


def _family(name: str, kind: str, text: str, samples: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in samples.items():
        yield f"{PREFIX}{name}{labels} {value}"
