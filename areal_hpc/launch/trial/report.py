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


def format_trial(
    episode_number: int, outcome: EpisodeOutcome, session: Session, printed: str = ""
) -> Iterator[str]:
    """Lines: what was said in one episode, what the agent `printed`, and what would be trained."""
    yield f"--- task {episode_number} {'-' * 60}"
    lines = printed.splitlines()
    if len(lines) > MAX_PRINTED_LINES:
        lines = [f"{len(lines)} lines, of which the last:", *lines[-MAX_PRINTED_LINES:]]
    for index, line in enumerate(lines):
        yield _format_labeled_line("" if index else "printed", line)
    for call, one in enumerate(session.tree, start=1):
        yield from _format_interaction(call, one)
    for name, count in session.count_uses_of_ignored_params().items():
        yield _format_labeled_line("no effect", f"{name}, in {count} calls")
    if outcome.status == "ok":
        yield _format_labeled_line("reward", f"{outcome.reward:g}")
        yield from _format_rows(session)
        return
    shown, *more = str(outcome.error or outcome.reason).splitlines()
    yield _format_labeled_line("FAILED", shown)
    trace = outcome.error.trace if outcome.error else ""
    for line in (*more, *trace.splitlines()):
        yield f"{'':<{LABEL_WIDTH}}{line}"
    if not len(session.tree):
        yield _format_labeled_line("", "no call to the model had been answered")


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
        names = ", ".join(tool["function"]["name"] for tool in tools[0])
        yield _format_labeled_line("tools", names)
    for message in interaction.new_messages:
        yield from _format_message(message)
    yield from _format_message(interaction.reply)
    reuse = {"reused": "prompt re-used", "retokenized": "prompt tokenized again"}.get(
        interaction.reuse
    )
    facts = [
        f"call {call_number}: {interaction.prompt_tokens} prompt tokens",
        f"{interaction.num_output_tokens} of the reply",
        f"ended by {interaction.finish_reason}",
        *([reuse] if reuse else []),
    ]
    yield f"{'':<{LABEL_WIDTH}}[{', '.join(facts)}]"


def _format_message(message: dict[str, Any]) -> Iterator[str]:
    if reasoning := message.get("reasoning_content"):
        yield from _format_shortened_text("reasoning", reasoning)
    content = message.get("content")
    if content or not message.get("tool_calls"):
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield from _format_shortened_text(message["role"], text)
    for tool_call in message.get("tool_calls") or ():
        function = tool_call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield from _format_shortened_text("tool call", f"{function['name']}({arguments})")


def _format_shortened_text(label: str, text: str) -> Iterator[str]:
    more = len(text) - MAX_SHOWN_CHARS
    shown = text[:MAX_SHOWN_CHARS] + (f" ... and {more} more characters" if more > 0 else "")
    for at, line in enumerate(shown.splitlines() or [""]):
        # Random tokens may be control characters, which a terminal would obey.
        printable = "".join(
            one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line
        )
        yield _format_labeled_line(label if at == 0 else "", printable)


def _format_rows(session: Session) -> Iterator[str]:
    rows = session.build_rows(TicketRef(0, 0), "trial")
    yield _format_labeled_line(
        "rows", str(len(rows)) if rows else "none: no reward reaches a reply"
    )
    for row in rows:
        trained = int(row.loss_mask_T.sum())
        calls = row.record.calls
        yield _format_labeled_line(
            "",
            f"row {row.row}: {row.num_tokens} tokens, {row.num_tokens - trained} of prompts and "
            f"{trained} of replies, which are trained; {len(calls)} "
            f"call{'s' if len(calls) > 1 else ''}, reward {row.reward:g}",
        )
    if rows and (unrewarded := rows[0].record.unrewarded_replies):
        yield _format_labeled_line(
            "", f"{unrewarded} replies are not trained: no reward reaches them"
        )
    # A stand-in leaves no token out: what a run would record is taken as recorded.
    is_recorded = session.request.records_sampling_mask
    for reasons, tokens in count_untrainable_tokens(
        rows, assumes_sampling_mask=is_recorded
    ).items():
        yield _format_labeled_line(
            "", f"{tokens} tokens of replies leave the loss: they were sampled with {reasons}"
        )


def _format_labeled_line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}".rstrip()
