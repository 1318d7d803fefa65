"""Costs of a run's telemetry: processor seconds of all its processes, with it and without.

Both sides are the quick start from the weights of its SFT on, whole `areal-hpc run` commands. The
side without leaves out what `benchmarks/without_telemetry/sitecustomize.py` names: events, spans,
annotations of tokens, the watch over episodes, held-out episodes in the shards, metrics of replies
and episodes, the exact entropy, speed, and alerts. Both record each call's columns in the shards:
the format has them (`areal-hpc bench proxy` and `bench shards` measure these).

A server polls while it waits, so that a run's processor seconds depend on how busy the machine is:
figures are medians of ratios of runs that follow each other, in alternating order.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import LAUNCHER_ROLE
from areal_hpc.rundir.telemetry.span_reader import read_spans
from benchmarks._pairs import Sample, add_out, cpu_ratio, report, wall_ratio

RECIPE = Path(__file__).resolve().parents[1] / "recipes/quickstart.yaml"
SITE_CUSTOMIZE_DIR = Path(__file__).with_name("without_telemetry")
PR_SET_CHILD_SUBREAPER = 36
WITH, WITHOUT = "with", "without"


def warm_up(folder: Path) -> Path:
    """The quick start's model after its SFT."""
    _run_quickstart(folder, "warmed-up", {"trainer.total_steps": 1, "evaluation.every_steps": 0})
    return _get_paths(folder, "warmed-up").sft_export


def play(folder: Path, model: Path, side: str, steps: int) -> Sample:
    """Measure one whole run of so many steps."""
    environment = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(SITE_CUSTOMIZE_DIR), os.environ.get("PYTHONPATH")])
        ),
        "WITHOUT_TELEMETRY": "1" if side == WITHOUT else "0",
    }
    overrides = {
        "model.tiny": "null",
        "model.path": model,
        "sft": "null",
        "trainer.total_steps": steps,
    }
    began_s, began_cpu_s = time.perf_counter(), _read_children_cpu_s()
    _run_quickstart(folder, side, overrides, environment)
    _reap_orphans()
    sample = Sample(time.perf_counter() - began_s, _read_children_cpu_s() - began_cpu_s)
    paths = _get_paths(folder, side)
    require_side(paths, side, steps)
    shutil.rmtree(paths.root)
    return sample


def _run_quickstart(
    folder: Path, trial: str, overrides: Mapping[str, object], environment: Mapping[str, str] = {}
) -> None:
    command = [sys.executable, "-m", "areal_hpc", "run", str(RECIPE)]
    command += [f"cluster.fileroot={folder}", f"trial_name={trial}"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    answer = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=RECIPE.parents[1],
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        raise ClusterError(f"{trial} failed: {answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")


def _get_paths(folder: Path, trial: str) -> RunPaths:
    return RunPaths(folder / "quickstart" / trial)


def _read_children_cpu_s() -> float:
    """Read the CPU time of all ended processes; orphans come to this one (see `main`)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap_orphans() -> None:
    """Wait for processes that the run has left behind."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def require_side(paths: RunPaths, side: str, steps: int) -> None:
    """Refuse to compare runs that differ from their side's description.

    Raises:
        ClusterError: Steps are missing, or a kind of telemetry is there or missing unlike the side.
    """
    last_step = max((row["step"] for row in read_readable_records(paths.metrics)), default=0)
    recorded = {
        "events": any(row["role"] != LAUNCHER_ROLE for row in read_readable_records(paths.events)),
        "spans": bool(read_spans(paths)),
        "annotations": any(paths.annotations_dir.glob("*.msgpack")),
    }
    if last_step != steps or set(recorded.values()) != {side == WITH}:
        raise ClusterError(f"the side {side!r} took {last_step} steps; recorded: {recorded}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench telemetry", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=8, help="runs of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of each run (%(default)s)")
    add_out(parser, "telemetry")
    arguments = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    samples: dict[str, list[Sample]] = {WITH: [], WITHOUT: []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        model = warm_up(Path(name))
        for number in range(arguments.pairs):
            for side in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                samples[side].append(sample := play(Path(name), model, side, arguments.steps))
                print(
                    f"{side:<8} {sample.cpu_s:6.1f} s of processors in {sample.wall_s:5.1f} s",
                    flush=True,
                )
    figures = {
        "cpu_with_over_without": cpu_ratio(samples, WITH, WITHOUT),
        "wall_with_over_without": wall_ratio(samples, WITH, WITHOUT),
        **{
            f"cpu_{side}_s": statistics.median(sample.cpu_s for sample in samples[side])
            for side in samples
        },
    }
    report(figures, {"pairs": arguments.pairs, "steps": arguments.steps}, arguments.out)


if __name__ == "__main__":
    main()
