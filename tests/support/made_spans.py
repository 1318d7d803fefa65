"""Spans of a run that was made up: of the trainer, and of a cell on a node whose clock is ahead."""

from areal_hpc.rundir.jsonl import append_lines
from areal_hpc.rundir.telemetry.spans import ClockSample, ProcessStart, Span
from tests.support.made_run import MadeRun


def add_spans(run: MadeRun, clock_off_s: float = 5.0) -> None:
    """Spans of the last step: of the trainer and of cell-0, on a node whose clock is ahead."""
    run.paths.spans_dir.mkdir()
    begin = run.now - 3.0
    ledger = [ProcessStart(begin - 9, "n00", 1, begin - 9), Span("serve", begin - 9, begin + 3)]
    append_lines(run.paths.spans("trainer-ledger"), ledger)
    trainer = [
        ProcessStart(begin - 9, "n00", 2, begin - 9),
        Span("batch_wait", begin, begin + 2),
        Span("train", begin + 2, begin + 2.5),
    ]
    append_lines(run.paths.spans("trainer-trainer"), trainer)
    there = begin + clock_off_s
    facts = {"ticket_id": 6, "attempt": 1, "episode": 0}
    driver = [
        ProcessStart(there, "n01", 3, there),
        ClockSample(there, -clock_off_s, 0.001),
        Span("episodes", there, there + 2),
        Span("episode", there + 0.1, there + 1.9, "episodes", facts | {"eval_step": -1}),
    ]
    append_lines(run.paths.spans("cell-0-driver"), driver)
    proxy = [
        ProcessStart(there, "n01", 4, there),
        Span("call", there + 0.2, there + 0.9, "replica 0", facts | {"reply_tokens": 7}),
        Span("call", there + 1.0, there + 1.8, "replica 0", facts | {"reply_tokens": 8}),
    ]
    append_lines(run.paths.spans("cell-0-proxy"), proxy)
