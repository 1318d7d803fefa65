"""AReaL's `get_custom_dataset`, which returns the rows that a script passes to the trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_hpc.areal.api.cli_args import DatasetConfig
from areal_hpc.areal.conversions import build_gsm8k_source
from areal_hpc.dataset.sources import iterate_task_rows
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig

TRAIN_DATASET_KEY = "train_dataset"


def get_custom_dataset(
    split: str, dataset_config: DatasetConfig, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Return the rows of one split.

    Args:
        split: `train` or `test`, which selects the files of that name in a folder or repository.
        dataset_config: `path` is a file, a folder that holds `train.jsonl` and `test.jsonl`, or
            GSM8K: `openai/gsm8k` in the hub's cache, or a folder of that name.
        tokenizer: Tokenizer for `max_length`, which leaves longer prompts out.

    Raises:
        RecipeError: There are no such rows, or `max_length` is set without a tokenizer.
    """
    sources = _build_task_set_configs(split, dataset_config.path)
    rows = [row for source in sources for row in iterate_task_rows(source, TRAIN_DATASET_KEY)]
    max_tokens = dataset_config.max_length
    if max_tokens is None:
        return rows
    if tokenizer is None:
        raise RecipeError(
            f"max_length={max_tokens} needs a tokenizer to count with",
            key=f"{TRAIN_DATASET_KEY}.max_length",
        )
    return [row for row in rows if _count_prompt_tokens(row, tokenizer) <= max_tokens]


def _build_task_set_configs(split: str, path_or_hub_name: str) -> Iterator[TaskSetConfig]:
    path = Path(path_or_hub_name).expanduser()
    lines = path / f"{split}.jsonl"
    source = build_gsm8k_source(path_or_hub_name, split)
    if source is None or path.is_file() or lines.exists():
        yield TaskSetConfig(path=lines if path.is_dir() else path)
        return
    if not path.is_dir():
        yield TaskSetConfig.model_validate(source)
        return
    pattern = source["hub"].removeprefix(f"{path_or_hub_name}/")
    files = sorted(path.glob(pattern))
    if not files:
        raise RecipeError(
            f"{path} holds neither {lines.name} nor {pattern}",
            key=f"{TRAIN_DATASET_KEY}.path",
        )
    for file in files:
        yield TaskSetConfig(path=file, to_task=source["to_task"])


def _count_prompt_tokens(row: dict[str, Any], tokenizer: Any) -> int:
    text = tokenizer.apply_chat_template(
        row["messages"], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer.encode(text, add_special_tokens=False))
