"""Costs of a thousand inference nodes for the ledger and the shared file system.

The real drivers of so many cells call the real ledger, a process of its own, over its real HTTP.
Their episodes are sleeps: log-normal, the 99th percentile 8 times the median. Nodes
are all alike, so a thousand ask for 64 times as much as 16, and a ticket should cost the same.

- rates: tickets are over in seconds and settle without files, so that the ledger is the bottleneck.
- files: ten times slower, with real shards, a real index, and a trainer that reads each batch. The
  system calls on files of the run directory, by whichever process, are counted with strace.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError
from benchmarks._pairs import add_out, report
from benchmarks._scale_cells import Tempo
from benchmarks._scale_run import Settings

FEW = 16
CALLS = "trace=%file,ftruncate,fsync,fdatasync,getdents64,fchmod"
"""System calls that reach a file system's metadata server, and syncs."""
TRACED = re.compile(r"^\d+ +(?P<at>\d+\.\d+) (?P<call>\w+)\((?P<rest>.*)$")
FAST = Tempo(5.6, 16, 8, 1.0, with_shards=False)
SLOW = Tempo(14.0, 2, 8, 10.0, with_shards=True)


def settings_of(nodes: int, tempo: Tempo, run_in_s: float, measured_s: float) -> Settings:
    """Build settings; a batch is a quarter of the running tickets, so admission never waits."""
    batch_size = max(1, nodes * tempo.tickets_at_once // 4)
    return Settings(nodes, batch_size, run_in_s, measured_s, tempo)


def run(settings: Settings, run_dir: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks._scale_run", json.dumps(asdict(settings))]
    answer = subprocess.run([*prefix, *command, str(run_dir)], capture_output=True, text=True)
    if answer.returncode:
        raise ClusterError(f"{settings.nodes} nodes: {answer.stderr[-3000:]}")
    seen: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return seen


def run_traced(settings: Settings, folder: Path) -> tuple[dict[str, Any], Counter[str]]:
    """Run one measurement under strace; return its calls on the run directory.

    Raises:
        ClusterError: There is no strace, or not one step was taken.
    """
    if shutil.which("strace") is None:
        raise ClusterError("system calls are counted with strace", hint="apt install strace")
    run_dir, trace = folder / "run", folder / "trace"
    run_dir.mkdir()
    prefix = ("strace", "-f", "--seccomp-bpf", "-ttt", "-y", "-e", CALLS, "-o", str(trace))
    seen = run(settings, run_dir, prefix)
    if not (seen["steps"] and seen["sealed"]):
        raise ClusterError(
            f"{settings.nodes} nodes took no step of {settings.batch_size} tickets in "
            f"{settings.measured_s:.0f} s: nothing to count a step by",
            hint="measure for longer, with --seconds",
        )
    return seen, count_calls(trace, run_dir, seen["began"], seen["ended"])


def count_calls(trace: Path, run_dir: Path, began: float, ended: float) -> Counter[str]:
    """Calls on files below `run_dir` between two times, those that found nothing too."""
    calls: Counter[str] = Counter()
    with trace.open(errors="replace") as lines:
        for line in lines:
            match = TRACED.match(line)
            if match and began <= float(match["at"]) <= ended and str(run_dir) in match["rest"]:
                calls[match["call"]] += 1
    return calls


def per_ticket_us(seen: Mapping[str, Any]) -> float:
    """The ledger's CPU time for each ticket that settled."""
    return 1e6 * float(seen["ledger_cpu_s"]) / int(seen["settled"])


def print_rates(rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Print the ledger's rates, a line a size."""
    print(
        f"{'nodes':>6}{'leases/s':>10}{'settled/s':>11}{'steps':>7}{'ledger us/ticket':>18}"
        f"{'of a core':>11}{'cells, of a core':>18}{'batch ms':>10}"
    )
    for nodes, seen in rows.items():
        wall_s = seen["wall_s"]
        print(
            f"{nodes:>6}{seen['granted'] / wall_s:>10.0f}{seen['settled'] / wall_s:>11.0f}"
            f"{seen['steps']:>7}{per_ticket_us(seen):>18.0f}{seen['ledger_cpu_s'] / wall_s:>11.2f}"
            f"{seen['cells_cpu_s'] / wall_s:>18.2f}{seen['manifest_ms']:>10.1f}"
        )


def print_files(seen: Mapping[str, Any], calls: Counter[str], batch_size: int) -> None:
    """Print the calls to the file system, a line a call."""
    steps = seen["steps"]
    print(f"\nfiles: {steps} steps of {batch_size} tickets, {seen['sealed']} shards sealed")
    print(f"{'system call':<24}{'a step':>10}{'a shard':>10}")
    for call, count in calls.most_common():
        print(f"{call:<24}{count / steps:>10.1f}{count / seen['sealed']:>10.2f}")
    print(f"reading a batch's shards: {seen['read_ms']:.0f} ms, its manifest: ", end="")
    print(f"{seen['manifest_ms']:.0f} ms")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, default=1024, help="compared with 16")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured at each size")
    add_out(parser, "scale")
    arguments = parser.parse_args(argv)
    nodes, seconds = arguments.nodes, arguments.seconds
    rates: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        for count in (FEW, nodes):
            run_dir = folder / str(count)
            run_dir.mkdir()
            rates[count] = run(settings_of(count, FAST, seconds / 2, seconds), run_dir)
        print_rates(rates)
        slow = settings_of(nodes, SLOW, seconds, 2 * seconds)
        filed, calls = run_traced(slow, folder)
    print_files(filed, calls, slow.batch_size)
    many = rates[nodes]
    figures = {
        "nodes": float(nodes),
        "leases_per_s": many["granted"] / many["wall_s"],
        f"ledger_cpu_us_per_ticket_{FEW}": per_ticket_us(rates[FEW]),
        f"ledger_cpu_us_per_ticket_{nodes}": per_ticket_us(many),
        "leases_per_s_of_ledger_cpu": many["granted"] / many["ledger_cpu_s"],
        "ledger_share_of_a_core": many["ledger_cpu_s"] / many["wall_s"],
        f"metadata_ops_per_step_{nodes}": calls.total() / filed["steps"],
        f"shards_per_step_{nodes}": filed["sealed"] / filed["steps"],
        "manifest_ms": filed["manifest_ms"],
        "read_batch_ms": filed["read_ms"],
    }
    settings = {
        "seconds": seconds,
        "rates": asdict(FAST),
        "files": asdict(slow),
        "calls_per_step": {call: round(n / filed["steps"], 1) for call, n in calls.most_common()},
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()
