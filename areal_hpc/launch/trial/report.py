"""Report of a trial: the conversation, the reward, and the rows it would become."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.session.tree import Interaction
from areal_hpc.trainer.batch.untrained import count_untrainable_tokens
from areal_hpc.wire.ledger import TicketRef

MAX_SHOWN_CHARS = 1200
MAX_PRINTED_LINES = 5
LABEL_WIDTH = 11
REUSE_TEXTS = {"reused": ", prompt re-used", "retokenized": ", prompt tokenized again"}


def format_trial(
    episode_number: int, outcome: EpisodeOutcome, session: Session, printed: str = ""
) -> Iterator[str]:
    """Lines: what was said in one episode, what the agent `printed`, and what would be trained."""
    yield f"--- task {episode_number} {'-' * 60}"
    lines = printed.splitlines()
    if len(lines) > MAX_PRINTED_LINES:
        lines = [f"{len(lines)} lines, of which the last:", *lines[-MAX_PRINTED_LINES:]]
    yield from _format_labeled("printed", lines)
    for call, interaction in enumerate(session.tree, start=1):
        yield from _format_interaction(call, interaction)
    for name, count in session.count_uses_of_ignored_params().items():
        yield from _format_labeled("no effect", [f"{name}, in {count} calls"])
    if outcome.status == "ok":
        yield from _format_labeled("reward", [f"{outcome.reward:g}"])
        yield from _format_labeled("rows", list(_describe_rows(session)))
        return
    trace = outcome.error.trace if outcome.error else ""
    lines = [*str(outcome.error or outcome.reason).splitlines(), *trace.splitlines()]
    if not len(session.tree):
        lines.append("no call to the model had been answered")
    yield from _format_labeled("FAILED", lines)


def format_trial_summary(
    outcomes: Sequence[EpisodeOutcome], ignored_grammars: Sequence[str]
) -> Iterator[str]:
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    rewards = " ".join(f"{outcome.reward:g}" for outcome in good)
    yield "-" * 71
    yield f"{len(good)} of {len(outcomes)} episodes ended well" + (
        f"; rewards {rewards}" if good else ""
    )
    if ignored_grammars:
        yield (
            f"the agent asked for replies by {', '.join(ignored_grammars)}, which the stand-in "
            "does not follow; --base-url asks a real server"
        )


def _format_interaction(call_number: int, interaction: Interaction) -> Iterator[str]:
    tools = json.loads(interaction.context or b"null")
    if tools and tools[0]:
        yield from _format_labeled(
            "tools", [", ".join(one["function"]["name"] for one in tools[0])]
        )
    for message in (*interaction.new_messages, interaction.reply):
        yield from _format_message(message)
    yield (
        f"{'':<{LABEL_WIDTH}}[call {call_number}: {interaction.prompt_tokens} prompt tokens, "
        f"{interaction.num_output_tokens} of the reply, ended by {interaction.finish_reason}"
        f"{REUSE_TEXTS.get(interaction.reuse, '')}]"
    )


def _format_message(message: dict[str, Any]) -> Iterator[str]:
    parts = [("reasoning", reasoning)] if (reasoning := message.get("reasoning_content")) else []
    content, tool_calls = message.get("content"), message.get("tool_calls") or ()
    if content or not tool_calls:
        parts.append((message["role"], content))
    for function in (tool_call["function"] for tool_call in tool_calls):
        arguments = _to_text(function["arguments"])
        parts.append(("tool call", f"{function['name']}({arguments})"))
    for label, part in parts:
        text = _to_text(part)
        more = len(text) - MAX_SHOWN_CHARS
        shown = text[:MAX_SHOWN_CHARS] + (f" ... and {more} more characters" if more > 0 else "")
        # Random tokens may be control characters, which a terminal would obey.
        lines = [
            "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
            for line in shown.splitlines() or [""]
        ]
        yield from _format_labeled(label, lines)


def _to_text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _describe_rows(session: Session) -> Iterator[str]:
    rows = session.build_rows(TicketRef(0, 0), "trial")
    yield str(len(rows)) if rows else "none: no reward reaches a reply"
    for row in rows:
        trained, calls = int(row.loss_mask_T.sum()), len(row.record.calls)
        yield (
            f"row {row.row}: {row.num_tokens} tokens, {row.num_tokens - trained} of prompts and "
            f"{trained} of replies, which are trained; {calls} call{'s' if calls > 1 else ''}, "
            f"reward {row.reward:g}"
        )
    if rows and (unrewarded := rows[0].record.unrewarded_replies):
        yield f"{unrewarded} replies are not trained: no reward reaches them"
    # A stand-in leaves no token out: what a run would record is taken as recorded.
    untrainable = count_untrainable_tokens(
        rows, assumes_sampling_mask=session.request.records_sampling_mask
    )
    for reasons, tokens in untrainable.items():
        yield f"{tokens} tokens of replies leave the loss: they were sampled with {reasons}"


def _format_labeled(label: str, lines: Sequence[str]) -> Iterator[str]:
    """Lines, the first of them behind a label."""
    for index, line in enumerate(lines):
        yield f"{'' if index else label:<{LABEL_WIDTH}}{line}".rstrip()
