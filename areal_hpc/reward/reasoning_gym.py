"""Reward for reasoning-gym tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_hpc.reward.answer_extraction import extract_boxed, extract_tagged


def reasoning_gym_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    metadata: Mapping[str, Any],
    **task: Any,
) -> float:
    r"""The score, 0.0 to 1.0, of the last `<answer>...</answer>` or `\boxed{...}`, else of all.

    Args:
        prompt: Not looked at; nor are `prompt_ids` and `completion_ids`.
        completions: What the model said.
        prompt_ids: Tokens of the prompt.
        completion_ids: Tokens of the reply.
        metadata: The task's, as the source `reasoning_gym` gives it.
        task: The rest of the task: `question` and `answer`.
    """
    import reasoning_gym

    given = extract_tagged(completions) or extract_boxed(completions) or completions.strip()
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(given, {**task, "metadata": metadata}))
