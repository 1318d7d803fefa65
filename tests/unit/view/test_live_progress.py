"""Progress of a run on a terminal, and in plain lines without one."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from areal_hpc.metrics.step_line import SPARKLINE_BLOCKS, draw_sparkline, format_step_line
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.lock import hold_lock
from areal_hpc.view.state.live_progress import PlainReporter
from tests.support.commands import exit_code_of
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun

BATCH = [MadeEpisode(task=task, reward=float(task % 2)) for task in range(8)]
SETS: dict[str, Any] = {f"evaluation__set{number}__avg@1": 0.5 for number in range(6)}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def learn(run: MadeRun, steps: int = 4) -> None:
    for step in range(steps):
        run.add_step(BATCH, grad_norm=0.0, reward__mean=step / steps, eval__reward=0.5, **SETS)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0.0, 0.5, 1.0], 8, "▁▅█"),
        ([9.0, 0.0, 0.5, 1.0], 3, "▁▅█"),
        ([2.0, 2.0], 8, "▁▁"),
        ([1.0, 2.0], 0, ""),
        ([], 8, ""),
    ],
)
def test_a_sparkline_draws_the_last_values(values: list[float], width: int, drawn: str) -> None:
    assert draw_sparkline(values, width) == drawn


def test_a_step_s_line_keeps_to_80_columns_whatever_was_evaluated() -> None:
    row = {f"evaluation/set{number}/avg@8": 0.5 for number in range(20)}
    row |= {"step": 1000, "reward/mean": 0.5, "time/step_s": 0.01, "tokens/trained": 10**7}
    assert len(format_step_line(row, 1000)) <= 80
    assert len(format_step_line(row | {"eval/reward": 0.5}, 1000)) <= 80


def watch_at_terminal(
    run: MadeRun, columns: int, stop: signal.Signals, *markers: str, **environ: str
) -> str:
    """Return the output of `areal-hpc watch` at a terminal, stopped once all markers were shown.

    The run takes a step after each of them.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "areal_hpc", "watch", str(run.paths.root)]
    variables = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", **environ}
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen(command, stdout=theirs, cwd=CHECKOUT, env=variables) as watcher,
    ):
        os.close(theirs)
        shown = b""
        try:
            for marker in markers:
                while marker not in ESCAPES.sub("", shown.decode(errors="replace")):
                    assert select.select([screen], [], [], scaled(30.0))[0], shown
                    shown += screen.read(4096)
                learn(run, 1)
        finally:
            watcher.send_signal(stop)
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more := screen.read(4096):
                shown += more
    assert watcher.returncode == 0
    return shown.decode()


@pytest.mark.parametrize(
    ("columns", "environ", "stop", "is_live", "has_color"),
    [
        (80, {}, signal.SIGINT, True, True),
        (60, {"NO_COLOR": "1"}, signal.SIGTERM, True, False),
        (80, {"TERM": "dumb"}, signal.SIGTERM, False, False),
    ],
)
def test_watch_shows_steps_and_alerts_within_the_terminal(
    columns: int,
    environ: dict[str, str],
    stop: signal.Signals,
    is_live: bool,
    has_color: bool,
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path)
    learn(run)
    with hold_lock(run.paths.lock):
        markers = ("(no_signal", "step      5/100")
        shown = watch_at_terminal(run, columns, stop, *markers, **environ)
    lines = ESCAPES.sub("", shown).splitlines()
    steps = [line for line in lines if line.startswith("step  ")]
    assert [line.split()[1] for line in steps][:5] == [f"{step}/100" for step in range(1, 6)]
    assert all("reward 0." in line for line in steps)
    assert any(block in steps[-1] for block in SPARKLINE_BLOCKS) == is_live
    assert ("\x1b[36m" in shown) == has_color
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == is_live, "the cursor is back"
    assert "…" not in shown, "an alert that is cut while a step is printed leaves a line behind"
    if is_live:
        assert max(map(cell_len, lines)) <= columns


def test_an_sft_stage_shows_its_losses_with_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path, sft={"total_steps": 100})
    reporter = PlainReporter(run.paths, total_steps=100, sft_steps=100)
    reporter.show_progress("replay")
    assert capsys.readouterr().out == ""
    for step in range(1, 5):
        row = {"step": step, "loss": 0.5, "time/step_s": 1.0, "tokens/trained": 500}
        append_line(run.paths.sft_metrics, row | ({"eval/loss": 0.25} if step == 4 else {}))
    with hold_lock(run.paths.lock):
        shown = watch_at_terminal(run, 100, signal.SIGINT, "96 s left")
    assert "SFT: loss 0.5000, held-out loss 0.2500, 500 tokens/s, 96 s left" in shown
    reporter.report_new_steps()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SFT")]
    assert lines == ["SFT step      4/100  loss 0.5000  held-out loss 0.2500  500 tokens/s"]


@pytest.mark.parametrize(("steps", "first_shown"), [(30, 21), (6, 1)])
def test_watch_ends_with_the_status_of_a_run_that_is_over(
    steps: int, first_shown: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path)
    learn(run, steps)
    run.finish()
    assert exit_code_of("watch", run.paths.root) == exit_code_of("status", run.paths.root)
    shown = capsys.readouterr().out
    told = [int(step) for step in re.findall(r"^step +(\d+)", shown, re.MULTILINE)]
    assert told == [*range(first_shown, steps + 1)]
    assert shown.count("made/run: finished\n") == 2
