"""Reward for reasoning-gym tasks, by the library's scorers in isolated workers."""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.reward.answer_extraction import extract_boxed, extract_tagged
from areal_hpc.reward.judging import literals
from areal_hpc.reward.verifier_pool import VerifierPool
from areal_hpc.sandbox.isolated_worker import WorkerSettings, open_worker_command

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S = 5.0
"""Time limit of one score; most take less than a hundredth of a second."""
SCORE_MEMORY_BYTES = 1 << 30
_PROGRAM = Path(__file__).with_name("reasoning_gym_worker.py")
_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mxfast=0"
_VARIABLES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": _TUNABLES}
"""Variables that make forks cheaper. With huge pages a fork, which copies the page table, takes a
third of the time; without fast bins it does not copy the pages with small free chunks."""
_HUGE_PAGES_DIR = Path("/sys/kernel/mm/transparent_hugepage")
"""Folder in which glibc looks up whether huge pages are enabled."""
_SCORERS = VerifierPool(
    partial(
        open_worker_command,
        [_PROGRAM, Path(literals.__file__)],
        WorkerSettings(SCORE_TIMEOUT_S, SCORE_MEMORY_BYTES, ends_with_answer=True),
        variables=_VARIABLES,
        readonly_folders=[str(_HUGE_PAGES_DIR)] if _HUGE_PAGES_DIR.is_dir() else (),
    ),
    SCORE_TIMEOUT_S + 1.0,
)


def reasoning_gym_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    metadata: Mapping[str, Any],
    **task: Any,
) -> float:
    r"""Score, from 0 to 1, the last `<answer>...</answer>` or `\boxed{...}`, else the whole reply.

    The task has `metadata`, `question` and `answer`, as `make_reasoning_tasks` returns them. The
    library computes the score in a process isolated by `reward.isolation`; an answer on which it
    fails, or takes longer than `SCORE_TIMEOUT_S`, earns 0.

    Raises:
        RecipeError: There is no such task set, or this machine cannot isolate the process.
        ClusterError: The process could not be started.
    """
    answer = extract_tagged(completions) or extract_boxed(completions) or completions.strip()
    entry = literals.encode({**task, "metadata": dict(metadata)}, _refuse_object)
    score_task = {"set": metadata["source_dataset"], "given": answer, "entry": entry}
    question = json.dumps({"do": "reset", "task": score_task}).encode()
    try:
        reply: dict[str, Any] = json.loads(_SCORERS.ask(question))
    except (TimeoutError, AgentError) as error:
        reply = {"error": repr(error), "is_of_episode": True}
    if "error" not in reply:
        return float(reply["reward"])
    if not reply.get("is_of_episode", True):
        raise RecipeError(
            f"reasoning-gym cannot score tasks of {score_task['set']!r}: {reply['error']}",
            key="train_dataset.kwargs.name",
            hint="reasoning_gym.factory.DATASETS lists the sets",
        )
    log.warning(
        "reasoning_gym_reward: the score of %s failed, reward 0: %s: %.80r",
        score_task["set"],
        reply["error"],
        answer,
    )
    return 0.0


def _refuse_object(value: Any) -> int:
    raise RecipeError(
        f"a task of reasoning-gym holds a {type(value).__name__}, which is no literal",
        key="metadata",
        hint="keep the task as make_reasoning_tasks gives it",
    )
