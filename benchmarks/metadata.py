"""Metadata operations on shared storage, a second, of each process of a run that trains.

A quick start without SFT runs in the foreground under strace, which records each call that names
a path of the run's folder: opens, stats, new folders, renames, removals. What the folder's server
is asked is counted by process from the end of the second step to the end of the one before the
last. Reads and writes of open files are no metadata. strace slows calls, so a second holds fewer
steps than without it, and no fewer polls.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from benchmarks._pairs import add_out, report

CALLS = "trace=%file,execve,clone,clone3,fork,vfork"
PROCESSES = {
    "areal_hpc.trainer.job": "trainer",
    "areal_hpc.ledger.job": "ledger",
    "areal_hpc.inference.job": "inference",
    "areal_hpc.proxy.job": "proxy",
    "areal_hpc.rollout.job": "driver",
}
CELL = ("inference", "proxy", "driver")
TRAINER = ("trainer", "ledger")
_LINE = re.compile(r"(\d+) (\d+\.\d+) (\w+)\((.*)")
_START = re.compile(r"(\d+) \d+\.\d+ (?:<\.\.\. )?(?:clone3?|v?fork)\b.*= (\d+)$")
"""A process that starts another; the call's end may stand in a line of its own."""


def record_calls(folder: Path, steps: int) -> list[str]:
    """Lines of strace about a run in `folder`."""
    model, log = folder / "model", folder / "strace"
    make_tiny_model(model, ["one two three 1 2 3 + ="])
    command = [
        *("strace", "-f", "-ttt", "-s", "400", "-e", CALLS, "-o", str(log)),
        *(
            sys.executable,
            "-m",
            "areal_hpc",
            "run",
            "quickstart",
            f"cluster.fileroot={folder}/runs",
        ),
        *("sft=null", f"model={{path: {model}, tiny: null}}", f"trainer.total_steps={steps}"),
        *("evaluation.every_steps=1000", "evaluation.sets={}"),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return log.read_text(errors="replace").splitlines()


def count_calls(
    lines: Iterable[str], run_dir: Path, begin: float, end: float
) -> Counter[tuple[str, str]]:
    """Calls that name a path of the run between two times, by process and kind."""
    process_by_pid: dict[int, str] = {}
    calls: Counter[tuple[str, str]] = Counter()
    for line in lines:
        if start := _START.match(line):
            parent = process_by_pid.get(int(start[1]), "launcher")
            process_by_pid.setdefault(int(start[2]), parent)
        if not (match := _LINE.match(line)):
            continue
        pid, at, call, rest = int(match[1]), float(match[2]), match[3], match[4]
        process = process_by_pid.get(pid, "launcher")
        if call == "execve":
            named = [name for entry, name in PROCESSES.items() if entry in rest]
            process_by_pid[pid] = named[0] if named else process
        elif begin <= at < end and str(run_dir) in rest:
            calls[process, call] += 1
    return calls


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench metadata", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=12)
    add_out(parser, "metadata")
    arguments = parser.parse_args(argv)
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        lines = record_calls(Path(name), arguments.steps)
        paths = RunPaths(Path(name) / "runs" / "quickstart" / "demo")
        ends = [row["unix_time_s"] for row in read_readable_records(paths.metrics)]
        begin, end = ends[1], ends[-2]
        counts = count_calls(lines, paths.root, begin, end)
    seconds, steps = float(end - begin), len(ends) - 3
    rates = {key: count / seconds for key, count in counts.items()}
    print(f"\n{steps} steps in {seconds:.1f} s; calls a second")
    for (process, call), rate in sorted(rates.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{process:<12}{call:<14}{rate:>8.2f}")

    def total(*processes: str) -> float:
        return sum((rate for (process, _), rate in rates.items() if process in processes), 0.0)

    figures = {
        "cell_per_s": total(*CELL),
        "trainer_per_s": total(*TRAINER),
        "launcher_per_s": total("launcher"),
        **{f"{process}_per_s": total(process) for process in PROCESSES.values()},
        "steps_per_s": steps / seconds,
    }
    report(figures, {"steps": arguments.steps}, arguments.out)


if __name__ == "__main__":
    main()
