"""Sandboxes that end with a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_hpc.sandbox.runtimes import Runtime, make_runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec


@asynccontextmanager
async def started(runtime: Runtime | str, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """Start a sandbox of a runtime, which may be given by its name."""
    chosen = make_runtime(runtime) if isinstance(runtime, str) else runtime
    sandbox = await chosen.start(spec)
    try:
        yield sandbox
    finally:
        await sandbox.stop()
