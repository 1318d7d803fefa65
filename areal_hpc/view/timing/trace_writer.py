"""Events of a trace in Chrome's format, which Perfetto opens."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.view.time_slices_on_lanes import Slice

TraceEvent = dict[str, Any]


class TraceEventCollector:
    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.events: list[TraceEvent] = []

    def name_process(self, pid: int, title: str) -> None:
        self._add_metadata("process_name", pid, 0, name=title)
        self._add_metadata("process_sort_index", pid, 0, sort_index=pid)

    def name_thread(self, pid: int, tid: int, title: str) -> None:
        self._add_metadata("thread_name", pid, tid, name=title)
        self._add_metadata("thread_sort_index", pid, tid, sort_index=tid)

    def add_slice(self, pid: int, tid: int, time_slice: Slice) -> None:
        self.events.append(
            {
                "ph": "X",
                "name": time_slice.name,
                "pid": pid,
                "tid": tid,
                "ts": self._to_microseconds_since_zero(time_slice.begin),
                # Both ends are rounded alike, so that slices that nest still do.
                "dur": self._to_microseconds_since_zero(time_slice.end)
                - self._to_microseconds_since_zero(time_slice.begin),
                "args": dict(time_slice.facts),
            }
        )

    def add_instant(
        self, pid: int, tid: int, name: str, unix_time: float, fields: Mapping[str, Any]
    ) -> None:
        event = {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid}
        self.events.append(
            event | {"ts": self._to_microseconds_since_zero(unix_time), "args": dict(fields)}
        )

    def add_count(self, pid: int, name: str, unix_time: float, value: int) -> None:
        event = {
            "ph": "C",
            "name": name,
            "pid": pid,
            "ts": self._to_microseconds_since_zero(unix_time),
        }
        self.events.append(event | {"args": {name: value}})

    def _to_microseconds_since_zero(self, unix_time: float) -> int:
        return max(0, round((unix_time - self._zero) * 1e6))  # an event may have begun before

    def _add_metadata(self, metadata_name: str, pid: int, tid: int, **fields: Any) -> None:
        self.events.append(
            {"ph": "M", "name": metadata_name, "pid": pid, "tid": tid, "args": fields}
        )
