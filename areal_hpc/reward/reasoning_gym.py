"""Reward for reasoning-gym tasks."""

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

    The task is as the source `reasoning_gym` gives it: `metadata`, `question` and `answer`.
    """
    import reasoning_gym

    given = extract_tagged(completions) or extract_boxed(completions) or completions.strip()
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(given, {**task, "metadata": metadata}))
