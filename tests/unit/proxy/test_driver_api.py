"""What is kept of sessions that were exported: enough to repeat the latest exports, not all."""

import asyncio

from areal_hpc.client.in_process_engine import EngineEndpoint, SingleServerRouter
from areal_hpc.proxy.http.driver_api import MAX_KEPT_EXPORTED_BYTES, DriverApi
from areal_hpc.proxy.sessions.recorder import MemoryRecorder
from areal_hpc.recipe.sections.proxy_and_shards import ProxyConfig
from areal_hpc.wire.proxy import ExportRequest, StartSessionRequest


def test_exported_sessions_are_forgotten_when_they_take_too_much_but_the_last_is_kept() -> None:
    recorder = MemoryRecorder()
    sessions = recorder.store.sessions
    router = SingleServerRouter(EngineEndpoint("http://127.0.0.1:1"))
    api = DriverApi(recorder, router, None, ProxyConfig())
    names = [api.start_session(StartSessionRequest("outside")).session_id for _ in range(4)]
    sizes = (
        MAX_KEPT_EXPORTED_BYTES // 2,
        MAX_KEPT_EXPORTED_BYTES // 2,
        1,
        2 * MAX_KEPT_EXPORTED_BYTES,
    )
    for name, size_bytes in zip(names, sizes, strict=True):
        sessions[name].recorded_bytes = size_bytes
        api.end_session(sessions[name])

    def export(name: str) -> list[str]:
        asyncio.run(api.export_trajectories(ExportRequest(name)))
        return [*sessions]

    first, second, small, large = names
    assert export(first) == names
    assert export(second) == names
    assert export(first) == names, "a repeat makes it the latest"
    assert export(small) == [first, small, large]
    assert export(large) == [large]
