"""Spans of model calls, for timelines."""

from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir.telemetry.spans import record_span
from areal_hpc.session.tree import Interaction


def record_interaction_span(session: Session, interaction: Interaction) -> None:
    tokens = {
        "prompt_tokens": interaction.prompt_tokens,
        "reply_tokens": len(interaction.output_ids) // 4,
        "cached_tokens": interaction.cached_tokens,
    }
    begin, end = interaction.asked_at, interaction.answered_at
    record_call_span("call", session, begin, end, interaction.replica, **tokens)


def record_call_span(
    span_name: str,
    session: Session,
    begin_time: float,
    end_time: float,
    replica: int,
    **tokens: int,
) -> None:
    facts = {}
    if (ref := session.request.ref) is not None:
        facts = {"ticket_id": ref.ticket_id, "attempt": ref.attempt}
        facts |= {"eval_step": ref.eval_step} if ref.eval_step >= 0 else {}
        facts["episode"] = session.request.episode
    record_span(span_name, begin_time, end_time, f"replica {replica}", **facts, **tokens)
