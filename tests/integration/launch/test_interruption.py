"""Ctrl-C at any phase: everything stops in time, nothing is left, the same command continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from areal_hpc.telemetry import read_json_lines
from tests.integration.launch.small_run import SmallRun, await_none_left

pytestmark = pytest.mark.timeout(600)

STOP_LIMIT_S = 20.0


def trained_steps(run: SmallRun) -> int:
    rows = read_json_lines(run.layout.metrics)
    return int(rows[-1]["step"]) if rows else -1


def test_ctrl_c_in_every_phase_then_the_run_completes(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    layout = run.layout
    phases = {
        "warm-up": lambda: bool(read_json_lines(layout.warmup_metrics)),
        "servers starting": lambda: any(layout.logs_dir.glob("latest/cell-0/*.log")),
        "first evaluation": lambda: (
            (layout.rendezvous_dir / "relay-cell-0.json").exists()
            and (layout.rendezvous_dir / "ledger.json").exists()
            and any(layout.epochs_dir.glob("*"))
        ),
        "training": lambda: trained_steps(run) >= 1,
    }
    for phase, reached in phases.items():
        seconds = run.interrupt_when(reached)
        assert seconds <= STOP_LIMIT_S, f"{phase}: {seconds:.1f} s"
        assert run.processes() == [], phase
        for name in ("relay-cell-0.json", "ledger.json"):
            (layout.rendezvous_dir / name).unlink(missing_ok=True)
    committed = trained_steps(run)
    run.finish()
    rows = read_json_lines(layout.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert committed >= 1
    assert run.processes() == []


def test_killing_the_launcher_stops_the_run(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    run.start()
    run.await_true(lambda: bool(read_json_lines(run.layout.warmup_metrics)))
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    await_none_left(run, STOP_LIMIT_S)


def test_a_second_launcher_in_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    run.start()
    run.await_true(lambda: bool(read_json_lines(run.layout.warmup_metrics)))
    other = SmallRun(tmp_path / "runs")
    other.start()
    assert other.wait() == 75
    assert "another launcher is running this recipe" in other.said()
    assert run.press_ctrl_c() <= STOP_LIMIT_S
