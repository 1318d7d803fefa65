"""Rewards of another function for a run's recorded episodes (`areal-hpc rejudge`).

The function is called as ready agents call theirs: with the task's messages, the text of the
episode's last reply, two times None in place of token ids, and the task's other keys. A parameter
named `conversation` gets all messages up to that reply, one named `folder` a folder with the kept
files of the episode's sandbox.
"""

import asyncio
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from areal_hpc.errors import RecipeError, ShardError, describe_exception
from areal_hpc.evaluation.statistics import compare_paired, estimate_mean
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.reward.judge_check import measure_agreement
from areal_hpc.rollout.execution.agent_sandboxes import MAX_KEPT_BYTES
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rejudged_rewards import RejudgedEpisode, read_rejudged_episodes
from areal_hpc.rundir.run_inputs import TaskSet
from areal_hpc.sandbox.unpacked_tree import UnpackedTree
from areal_hpc.view.batch_episodes import read_ticket_episodes
from areal_hpc.view.formatting import Answer, Finding, build_page_url_fragment
from areal_hpc.view.transcripts.messages import Message, extract_text, get_messages, locate_calls
from areal_hpc.wire.trajectory import TrajectoryRow

MAX_SHOWN_CHANGES = 10
MAX_KEPT_FILES = 1000


@contextmanager
def unpack_kept_files(archive: Path) -> Iterator[Path]:
    """Unpack the files of an episode's sandbox into a folder, which is removed in the end."""
    if not archive.exists():
        raise RecipeError(
            "no files of this episode's sandbox were kept: too large, or its agent failed",
            key=str(archive),
            hint="keep fewer by rollout.agent.sandbox.keep_files in the next run",
        )
    with tempfile.TemporaryDirectory(prefix="areal_hpc_rejudge.") as scratch:
        folder = Path(scratch)
        tree = UnpackedTree(folder, max_bytes=MAX_KEPT_BYTES, max_files=MAX_KEPT_FILES)
        with archive.open("rb") as stream:
            tree.write_archive(stream)
        tree.apply_folder_modes()
        tree.remove_links_leading_out()
        yield folder


def bind_arguments(
    signature: inspect.Signature,
    task: dict[str, Any],
    conversation: list[Message],
    folder: Path | None = None,
) -> inspect.BoundArguments:
    options = {name: value for name, value in task.items() if name != "messages"}
    if folder is not None:
        options["folder"] = folder
    if "conversation" in signature.parameters:
        options["conversation"] = conversation
    prompt = task.get("messages", conversation[:-1])
    text = extract_text(conversation[-1].get("content"))
    try:
        return signature.bind(prompt, text, None, None, **options)
    except TypeError as error:
        raise RecipeError(
            f"the function cannot be called for this task: {error}",
            key="--reward",
            hint="take (prompt, completions, prompt_ids, completion_ids, **task)",
        ) from error


async def rejudge_steps(
    run: RunPaths,
    function_path: str,
    steps: Sequence[int],
    *,
    only_failed: bool,
    timeout_s: float,
    print_line: Callable[[str], None],
) -> list[RejudgedEpisode]:
    """Judge the episodes of these batches that have no new reward yet; return all of them.

    `only_failed` leaves out episodes whose recorded reward is above 0. `timeout_s` limits one call.

    Raises:
        RecipeError: The function is not there, or none of the episodes can be judged by it.
    """
    function, recipe = load_user_function(function_path, "--reward"), load_recipe(run.recipe)
    environ = {**os.environ, ISOLATION_VARIABLE: recipe.reward.isolation}
    ask = AsyncRewardWrapper(
        function, timeout_s, max_retries=1, timeout_reward=None, environ=environ
    )
    signature = inspect.signature(function)
    keeps_files = bool(recipe.rollout.agent.sandbox.keep_files)
    reads_files = keeps_files and "folder" in signature.parameters
    known = read_rejudged_episodes(run, function_path)
    tasks = TaskSet.read(run.dataset("train"))
    file = run.rejudged_rewards(function_path)
    file.parent.mkdir(exist_ok=True)
    refusals: list[RecipeError] = []

    async def judge(unjudged: RejudgedEpisode, rows: Sequence[TrajectoryRow]) -> RejudgedEpisode:
        if earlier := known.get((unjudged.shard, unjudged.rows[0])):
            return earlier
        task_index = rows[0].record.task_index
        try:
            task = tasks[task_index] if task_index >= 0 else {}  # else the agent brought its own
            conversation = find_conversation(rows)
            with ExitStack() as ends:
                archive = run.kept_files_dir / f"{unjudged.session_id}.tar"
                folder = ends.enter_context(unpack_kept_files(archive)) if reads_files else None
                bound = bind_arguments(signature, task, conversation, folder)
                judged = replace(unjudged, reward=await ask(*bound.args, **bound.kwargs))
        except Exception as error:  # boundary: the user's function; the line says its error
            if isinstance(error, RecipeError):
                refusals.append(error)
            judged = replace(unjudged, error=describe_exception(error))
        append_line(file, judged)
        return judged

    episodes: list[RejudgedEpisode] = []
    for step in steps:
        chosen = [
            (unjudged, rows)
            for unjudged, rows in list_unjudged_episodes(run, step)
            if not only_failed or unjudged.old_reward <= 0
        ]
        episodes += await asyncio.gather(*starmap(judge, chosen))
        print_line(f"step {step}: {len(chosen)} episodes")
    if refusals and len(refusals) == len(episodes):
        raise refusals[0]
    return episodes


def list_unjudged_episodes(
    run: RunPaths, step: int
) -> Iterator[tuple[RejudgedEpisode, list[TrajectoryRow]]]:
    """Read the episodes of a batch, without a new reward, and their rows."""
    for ticket, episodes in read_ticket_episodes(run, step):
        for rows_by_number in episodes:
            rows = [*rows_by_number.values()]
            unjudged = RejudgedEpisode(
                step=step,
                ticket_id=ticket.ref.ticket_id,
                episode=rows[0].episode,
                session_id=rows[0].record.session_id,
                shard=ticket.shard,
                rows=[*rows_by_number],
                old_reward=rows[0].reward,
            )
            yield unjudged, rows


def find_conversation(rows: Sequence[TrajectoryRow]) -> list[Message]:
    """Return the messages up to the reply of an episode that was answered last."""
    if any(row.record.is_credited for row in rows):
        raise RecipeError(
            "the run's agent says what each reply earned, so no reward is that of an episode",
            key="--reward",
            hint="rejudge a run whose agent returns the reward of an episode",
        )
    replies = [
        (call.answered_at, number, index)
        for number, row in enumerate(rows)
        for index, call in locate_calls(row.record.calls)
        if 0 <= index < len(get_messages(row))
    ]
    if not replies:
        raise ShardError(f"session {rows[0].record.session_id!r} has no recorded reply")
    _, number, index = max(replies)
    return get_messages(rows[number])[: index + 1]


def describe_changes(
    episodes: Sequence[RejudgedEpisode], run: RunPaths, function_path: str
) -> Answer:
    """Compare new rewards with those that the episodes were trained with."""
    pairs = [(each, each.reward) for each in episodes if each.reward is not None]
    errors = [each.error for each in episodes if each.reward is None]
    table = []
    if errors:
        table.append(f"{len(errors)} episodes have no new reward, the first for {errors[0]}")
    if not pairs:
        return Answer("no episode has a new reward", table=tuple(table), is_well=False)
    by_ticket: dict[int, list[tuple[float, float]]] = {}
    for each, reward in pairs:
        by_ticket.setdefault(each.ticket_id, []).append((each.old_reward, reward))
    old_T = [fmean(old for old, _ in group) for group in by_ticket.values()]
    new_T = [fmean(new for _, new in group) for group in by_ticket.values()]
    agreement = measure_agreement([new for _, new in pairs], [each.old_reward for each, _ in pairs])
    table += [
        f"recorded mean     {estimate_mean(old_T)}",
        f"new mean          {estimate_mean(new_T)}",
        f"difference        {compare_paired(old_T, new_T).difference}",
        f"rank correlation  {agreement.rank_correlation:.3f}",
    ]
    changed = [(each, new) for each, new in pairs if new != each.old_reward]
    changed.sort(key=lambda pair: -abs(pair[1] - pair[0].old_reward))
    findings = [
        Finding(
            f"{each.old_reward:.3f} -> {new:.3f}  step {each.step}, ticket {each.ticket_id}, "
            f"episode {each.episode}",
            build_page_url_fragment("trajectory", run.run_name, row=f"{each.shard}/{each.rows[0]}"),
        )
        for each, new in changed[:MAX_SHOWN_CHANGES]
    ]
    return Answer(
        f"{len(changed)} of {len(pairs)} rewards differ",
        tuple(findings),
        (f"areal-hpc replay RUN --rewards {function_path}",),
        tuple(table),
        is_well=not errors,
    )
