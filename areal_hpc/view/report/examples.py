"""Good, bad and typical episodes of a run's newest batch, as conversations."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.errors import ShardError
from areal_hpc.rundir.manifests import list_manifest_steps
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.batch_episodes import (
    BatchEpisode,
    read_batch_episodes,
    read_first_row_of_each_episode,
)
from areal_hpc.view.transcripts.messages import list_call_facts, list_shown_messages
from areal_hpc.wire.row_record import CallRecord
from areal_hpc.wire.trajectory import TrajectoryRow

MAX_EPISODES_OF_EACH_KIND = 2
MAX_TEXT_CHARS = 4000
MAX_MESSAGES = 60


@dataclass(frozen=True, slots=True)
class ExampleMessage:
    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[str, ...] = ()
    facts: str = ""
    """Of a recorded call: seconds, tokens, reward."""


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    example_kind: str
    """`good`, `bad` or `typical`."""
    title: str
    facts: str
    messages: tuple[ExampleMessage, ...]


def choose_example_episodes(
    paths: RunPaths, last_step: int, problems: list[str]
) -> list[ShownEpisode]:
    for step in reversed([one for one in list_manifest_steps(paths) if one <= last_step][-3:]):
        episodes = read_batch_episodes(paths, [step], problems)
        if not episodes:
            continue
        chosen = list(_pick_examples(episodes))
        try:
            rows = read_first_row_of_each_episode(paths, [one for _, one in chosen])
        except ShardError as error:
            problems.append(str(error))
            continue
        return [
            _build_shown_episode(sort, one, row)
            for (sort, one), row in zip(chosen, rows, strict=True)
        ]
    return []


def _pick_examples(
    episodes: Sequence[BatchEpisode],
) -> Iterator[tuple[str, BatchEpisode]]:
    """The best, the worst, and those nearest to the median reward, each of two groups. Pure."""
    middle = statistics.median(one.mean_row_reward for one in episodes)
    orders: dict[str, Callable[[BatchEpisode], float]] = {
        "good": lambda one: -one.mean_row_reward,
        "bad": lambda one: one.mean_row_reward,
        "typical": lambda one: abs(one.mean_row_reward - middle),
    }
    used: set[str] = set()
    for sort, order in orders.items():
        first_of_group: dict[int, BatchEpisode] = {}
        for one in sorted(episodes, key=order):
            if one.first_row_name not in used:
                first_of_group.setdefault(one.ticket_id, one)
        for one in list(first_of_group.values())[:MAX_EPISODES_OF_EACH_KIND]:
            used.add(one.first_row_name)
            yield sort, one


def _build_shown_episode(
    example_kind: str, episode: BatchEpisode, row: TrajectoryRow
) -> ShownEpisode:
    messages = [
        ExampleMessage(
            role=_cut_out_middle(message.title, 100),
            text=_cut_out_middle(message.text),
            reasoning=_cut_out_middle(message.reasoning),
            tool_calls=tuple(map(_cut_out_middle, message.tool_calls)),
            facts=_describe_call(message.call) if message.call else "",
        )
        for message in list_shown_messages(row)
    ]
    if len(messages) > MAX_MESSAGES:
        left_out = ExampleMessage("", f"({len(messages) - MAX_MESSAGES} messages are left out)")
        half = MAX_MESSAGES // 2
        messages = [*messages[:half], left_out, *messages[-half:]]
    facts = [f"reward {episode.mean_row_reward:g}", f"{int(row.loss_mask_T.sum())} tokens sampled"]
    if episode.is_timed:
        facts.append(f"{episode.record.duration_s:.1f} s")
    if episode.task >= 0:
        facts.append(f"task {episode.task}")
    facts.append(episode.first_row_name)
    return ShownEpisode(example_kind, episode.title, ", ".join(facts), tuple(messages))


def _describe_call(call: CallRecord) -> str:
    facts = list_call_facts(call)
    if call.reward is not None:
        facts.append(f"reward {call.reward.value:g}")
        facts += [f"{name} {value:g}" for name, value in call.reward.parts.items()]
    return ", ".join(facts)


def _cut_out_middle(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    if len(text) <= max_chars:
        return text
    first, last = text[: max_chars // 2], text[-max_chars // 2 :]
    return f"{first}\n[... {len(text) - max_chars} characters ...]\n{last}"
