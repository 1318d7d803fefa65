"""Tracker program of OpenTelemetry: send metrics and spans as OTLP over HTTP, in JSON.

It needs no SDK. OpenTelemetry's variables say where to: OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS,
OTEL_SERVICE_NAME. `sync.py` has the format of its standard input.

A step is a trace: a root span, and below it what each process did meanwhile. Spans that lasted
longer are cut at the step's ends, and the next step has the rest. Ids follow from names and times,
so a part that is sent again after a kill replaces what was sent.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans, select_spans

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
SERVICE_NAME_VARIABLE = "OTEL_SERVICE_NAME"
SCOPE = {"name": "areal_hpc"}
REQUEST_TIMEOUT_S = 30.0
INTERNAL_SPAN = 1
"""OTLP's kind of spans without a remote side."""


def send_part(part: Mapping[str, Any]) -> None:
    """Send the metrics of a part's rows, and the spans of the steps that ended in them."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/")
    if not endpoint:
        sys.exit(f"{ENDPOINT_VARIABLE} is not set; set it as to http://localhost:4318")
    paths = RunPaths(Path(part["run_dir"]))
    ends = {
        row["step"]: row["unix_time_s"]
        for row in read_metrics(paths.metrics)
        if row.get("unix_time_s")
    }
    begins = {
        step: max((at for at in ends.values() if at < ends[step]), default=0.0)
        for row in part["rows"]
        if "unix_time_s" in row and (step := row["step"]) in ends
    }
    last = max((ends[step] for step in begins), default=0.0)
    processes = read_spans(paths, min(begins.values()), last) if begins else []
    with httpx.Client(headers=_read_headers(), timeout=REQUEST_TIMEOUT_S) as client:
        for row in part["rows"]:
            if (end := ends.get(row["step"])) is None:
                continue
            gauges = list(_build_gauges(row, end))
            metrics = {"scopeMetrics": [{"scope": SCOPE, "metrics": gauges}]}
            _post(client, f"{endpoint}/v1/metrics", "resourceMetrics", [_describe(part) | metrics])
            if (begin := begins.get(row["step"])) is not None:
                seen = select_spans(processes, begin, end)
                spans = list(_build_step_trace(part, row["step"], begin, end, seen))
                _post(client, f"{endpoint}/v1/traces", "resourceSpans", spans)


def _read_headers() -> dict[str, str]:
    pairs = os.environ.get(HEADERS_VARIABLE, "").split(",")
    named = (pair.partition("=") for pair in pairs if "=" in pair)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in named}


def _post(client: httpx.Client, url: str, key: str, resources: list[dict[str, Any]]) -> None:
    try:
        reply = client.post(url, json={key: resources})
        reply.raise_for_status()
    except httpx.HTTPError as error:
        sys.exit(f"{url}: {error}")
    partial = reply.json().get("partialSuccess", {}) if reply.content else {}
    if message := partial.get("errorMessage"):
        sys.exit(f"{url} refused a part: {message}")


def _describe(part: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    attributes = {
        "service.name": os.environ.get(SERVICE_NAME_VARIABLE) or "areal-hpc",
        "areal_hpc.run": part["name"],
        "areal_hpc.run_id": part["id"],
        **more,
    }
    return {"resource": {"attributes": _build_attributes(attributes)}}


def _build_attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _build_value(value)} for key, value in values.items()]


def _build_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"stringValue": json.dumps(value)}


def _build_gauges(row: Mapping[str, Any], at: float) -> Iterator[dict[str, Any]]:
    for name, value in row.items():
        if isinstance(value, int | float) and name != "unix_time_s":
            point = {"timeUnixNano": _format_time(at), "asDouble": float(value)}
            yield {"name": f"areal_hpc.{name}", "gauge": {"dataPoints": [point]}}


def _build_step_trace(
    part: Mapping[str, Any],
    step: int,
    begin: float,
    end: float,
    processes: Sequence[ProcessSpans],
) -> Iterator[dict[str, Any]]:
    trace = _make_id(32, part["id"], step)
    root = _make_id(16, part["id"], step)
    first = min((span.begin for process in processes for span in process.spans), default=end)

    def build_span(span_id: str, name: str, begin: float, end: float, **more: Any) -> Any:
        return {
            "traceId": trace,
            "spanId": span_id,
            "name": name,
            "kind": INTERNAL_SPAN,
            "startTimeUnixNano": _format_time(begin),
            "endTimeUnixNano": _format_time(end),
            **more,
        }

    begin = max(begin, min(first, end))
    spans = [build_span(root, f"step {step}", begin, end)]
    yield _describe(part) | {"scopeSpans": [{"scope": SCOPE, "spans": spans}]}
    for process in processes:
        spans = [
            build_span(
                _make_id(16, part["id"], step, process.name, process.pid, number),
                span.name,
                max(span.begin, begin),
                min(span.end, end),
                parentSpanId=root,
                attributes=_build_attributes({"lane": span.lane, **span.facts}),
            )
            for number, span in enumerate(process.spans)
        ]
        identity = {
            "service.instance.id": process.name,
            "host.name": process.node,
            "process.pid": process.pid,
        }
        yield _describe(part, **identity) | {"scopeSpans": [{"scope": SCOPE, "spans": spans}]}


def _make_id(digits: int, *facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:digits]


def _format_time(unix_time_s: float) -> str:
    return str(round(unix_time_s * 1e9))


if __name__ == "__main__":
    send_part(json.load(sys.stdin))
