"""Paired measurements: every round runs all sides, in alternating order; medians of ratios."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one side."""

    wall_s: float
    cpu_s: float
    """CPU time of all threads of this process, the kernel's work for them included."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared; only `run` is timed, and its result is freed afterwards."""

    name: str
    run: Callable[[], object]
    clean: Callable[[], None] = lambda: None
    """Called after each run."""


Samples = Mapping[str, Sequence[Sample]]


def measure_pairs(sides: Sequence[Side], pairs: int) -> Samples:
    """Measure every side, round by round, after one round that does not count."""
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for number in range(-1, pairs):
        for side in sides if number % 2 else reversed(sides):
            sample = _measure(side)
            if number >= 0:
                samples[side.name].append(sample)
    return samples


def _measure(side: Side) -> Sample:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    result = side.run()
    sample = Sample(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
    del result
    side.clean()
    return sample


def wall_ratio(samples: Samples, above: str, below: str) -> float:
    """Median over rounds of the wall time of `above` over that of `below`."""
    pairs = zip(samples[above], samples[below], strict=True)
    return statistics.median(a.wall_s / b.wall_s for a, b in pairs)


def cpu_ratio(samples: Samples, above: str, below: str) -> float:
    """Median over rounds of the CPU time of `above` over that of `below`."""
    pairs = zip(samples[above], samples[below], strict=True)
    return statistics.median(a.cpu_s / b.cpu_s for a, b in pairs)


def median_wall_s(samples: Samples, name: str) -> float:
    return statistics.median(sample.wall_s for sample in samples[name])


def print_samples(title: str, samples: Samples, megabytes: float) -> None:
    """A table of medians, with the range of wall times."""
    print(f"\n{title:<44}{'ms':>9}{'min':>8}{'max':>8}{'CPU ms':>9}{'MB/s':>8}")
    for name, held in samples.items():
        walls_ms = [1e3 * sample.wall_s for sample in held]
        wall_ms = statistics.median(walls_ms)
        cpu_ms = 1e3 * statistics.median(sample.cpu_s for sample in held)
        print(
            f"  {name:<42}{wall_ms:>9.1f}{min(walls_ms):>8.1f}{max(walls_ms):>8.1f}"
            f"{cpu_ms:>9.1f}{megabytes / wall_ms * 1e3:>8.0f}"
        )


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the argument for the file of figures."""
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="file to write")


def report(figures: Mapping[str, float], settings: Mapping[str, object], out: Path) -> None:
    """Write figures, settings and machine to `out`; print the figures as the last line."""
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    content = {**rounded, "settings": dict(settings), "machine": machine}
    out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwritten to {out}")
    print(json.dumps(rounded))
