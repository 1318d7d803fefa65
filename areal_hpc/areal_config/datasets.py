"""`get_custom_dataset`: the rows that AReaL's scripts hand to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_hpc.areal_config.options import DatasetConfig
from areal_hpc.dataset import config
from areal_hpc.dataset.rows import rows
from areal_hpc.errors import RecipeError


def get_custom_dataset(
    split: str, dataset_config: DatasetConfig, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """The rows of one split.

    Args:
        split: `train` or `test`: of a folder, the file of that name.
        dataset_config: `path` is a file of JSON lines, or a folder that holds one a split.
        tokenizer: Counts tokens for `max_length`, which leaves longer prompts out.

    Raises:
        RecipeError: There are no such rows, or `max_length` comes without a tokenizer.
    """
    path = Path(dataset_config.path).expanduser()
    if path.is_dir():
        path = path / f"{split}.jsonl"
    given = list(rows(config.DatasetConfig(path=path), "train_dataset"))
    longest = dataset_config.max_length
    if longest is None:
        return given
    if tokenizer is None:
        raise RecipeError(
            f"max_length={longest} needs a tokenizer to count with", key="train_dataset.max_length"
        )
    return [row for row in given if _length(row, tokenizer) <= longest]


def _length(row: dict[str, Any], tokenizer: Any) -> int:
    text = tokenizer.apply_chat_template(
        row["messages"], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer.encode(text, add_special_tokens=False))
