"""Cost of a sandbox: its start, cold and from a warm pool, and each command in it.

- cold: from nothing to the end of the first command, in a sandbox started when it is wanted.
- warm: from asking a pool that has some ready to the end of the first command.
- command: `true` in a sandbox at work; its peer is the same program started by this process.
- many: this many sandboxes started at once, until the last has run its first command.
- calls: model calls a second of as many episodes at once, by programs in sandboxes that reach the
  model's endpoint alone, and by the same programs without one (`benchmarks/_sandbox_calls.py`).

With `--root` sandboxes have that root file system; by default they show this machine's programs.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from areal_hpc.sandbox.runtimes import Runtime, SandboxPool, find_installed_runtimes, make_runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec
from benchmarks._pairs import add_out, report
from benchmarks._sandbox_calls import measure_calls


async def time_ms(work: Callable[[], Awaitable[object]]) -> float:
    """Wall time."""
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1e3


async def run_first_command(runtime: Runtime, spec: SandboxSpec) -> Sandbox:
    """A new sandbox that has run a command."""
    sandbox = await runtime.start(spec)
    await sandbox.exec(["true"])
    return sandbox


async def measure_cold(runtime: Runtime, spec: SandboxSpec, rounds: int) -> float:
    """Measure the median of cold starts, without the ends of the sandboxes."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        sandbox = await run_first_command(runtime, spec)
        times.append((time.perf_counter() - began) * 1e3)
        await sandbox.stop()
    return statistics.median(times)


async def measure_warm(runtime: Runtime, spec: SandboxSpec, rounds: int) -> float:
    """Measure the median of warm starts; the pool has time to start another sandbox before each."""
    pool = SandboxPool(runtime, spec, 1)
    times = []
    try:
        for _ in range(rounds):
            await pool.fill()
            began = time.perf_counter()
            async with pool.acquire() as sandbox:
                await sandbox.exec(["true"])
                times.append((time.perf_counter() - began) * 1e3)
    finally:
        await pool.close()
    return statistics.median(times)


async def measure_commands(runtime: Runtime, spec: SandboxSpec, rounds: int) -> tuple[float, float]:
    """Measure medians of a command in a sandbox, and of one of this process, in turn."""

    async def run_plain() -> None:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()

    sandbox = await run_first_command(runtime, spec)
    within, plain = [], []
    try:
        for _ in range(rounds):
            within.append(await time_ms(lambda: sandbox.exec(["true"])))
            plain.append(await time_ms(run_plain))
    finally:
        await sandbox.stop()
    return statistics.median(within), statistics.median(plain)


async def measure_many(runtime: Runtime, spec: SandboxSpec, count: int) -> float:
    """Measure the time until the last of the sandboxes has run a command."""
    began = time.perf_counter()
    started = await asyncio.gather(*(run_first_command(runtime, spec) for _ in range(count)))
    took_ms = (time.perf_counter() - began) * 1e3
    await asyncio.gather(*(sandbox.stop() for sandbox in started))
    return took_ms


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    runtime, spec = make_runtime(arguments.runtime), SandboxSpec(root=arguments.root)
    await measure_cold(runtime, spec, 1)  # pages of programs are read
    within, plain = await measure_commands(runtime, spec, arguments.commands)
    made = {}
    if runtime.name != "none":
        made = await measure_calls(
            runtime, arguments.many, arguments.calls, arguments.pairs, arguments.reply_s
        )
    return {
        "cold_start_ms": await measure_cold(runtime, spec, arguments.rounds),
        "warm_start_ms": await measure_warm(runtime, spec, arguments.rounds),
        "command_ms": within,
        "plain_command_ms": plain,
        "many_start_ms": await measure_many(runtime, spec, arguments.many),
        **made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench sandbox", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    isolating = [name for name in find_installed_runtimes() if name != "none"]
    parser.add_argument("--runtime", choices=isolating, default="bwrap", help="which (bwrap)")
    parser.add_argument("--root", type=Path, help="folder of a root file system")
    parser.add_argument("--rounds", type=int, default=20, help="sandboxes of each kind (20)")
    parser.add_argument("--commands", type=int, default=100, help="commands of each kind (100)")
    parser.add_argument("--many", type=int, default=64, help="sandboxes started at once (64)")
    parser.add_argument("--calls", type=int, default=20, help="model calls of an episode (20)")
    parser.add_argument("--pairs", type=int, default=6, help="rounds of model calls (6)")
    parser.add_argument("--reply-s", type=float, default=0.5, help="until the model answers (0.5)")
    add_out(parser, "sandbox")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments))
    settings = {
        name: getattr(arguments, name)
        for name in ("runtime", "rounds", "commands", "many", "calls", "pairs", "reply_s")
    }
    report(figures, settings | {"root": str(arguments.root or "")}, arguments.out)


if __name__ == "__main__":
    main()
