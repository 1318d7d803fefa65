"""Spans of a run that was made up: of the trainer, and of a cell on another node."""

from areal_hpc.rundir.jsonl import append_lines
from areal_hpc.rundir.telemetry.spans import ProcessStart, Span
from tests.support.made_run import MadeRun


def add_spans(run: MadeRun) -> None:
    """Spans of the last step: of the trainer and of cell-0, on another node."""
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
    facts = {"ticket_id": 6, "attempt": 1, "episode": 0}
    driver = [
        ProcessStart(begin, "n01", 3, begin),
        Span("episodes", begin, begin + 2),
        Span("episode", begin + 0.1, begin + 1.9, "episodes", facts | {"eval_step": -1}),
    ]
    append_lines(run.paths.spans("cell-0-driver"), driver)
    proxy = [
        ProcessStart(begin, "n01", 4, begin),
        Span("call", begin + 0.2, begin + 0.9, "replica 0", facts | {"reply_tokens": 7}),
        Span("call", begin + 1.0, begin + 1.8, "replica 0", facts | {"reply_tokens": 8}),
    ]
    append_lines(run.paths.spans("cell-0-proxy"), proxy)
