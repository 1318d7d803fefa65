"""`get_custom_dataset`: files, folders, and GSM8K as it lies in a cache or a clone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.areal.api.cli_args import DatasetConfig
from areal_hpc.areal.dataset import get_custom_dataset
from areal_hpc.errors import RecipeError

GSM8K = Path(__file__).parents[2] / "samples" / "gsm8k.parquet"


def put(folder: Path) -> None:
    (folder / "main").mkdir(parents=True)
    shutil.copy(GSM8K, folder / "main" / "train-00000-of-00001.parquet")


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"split": split}))
        assert get_custom_dataset(split, DatasetConfig(str(tmp_path))) == [{"split": split}]
    assert get_custom_dataset("x", DatasetConfig(str(tmp_path / "test.jsonl"))) == [
        {"split": "test"}
    ]


def test_a_clone_of_gsm8k_becomes_tasks(tmp_path: Path) -> None:
    put(tmp_path / "gsm8k")
    config = DatasetConfig(str(tmp_path / "gsm8k"))
    tasks = get_custom_dataset("train", config)
    assert tasks
    assert all(task.keys() == {"messages", "answer"} for task in tasks)
    with pytest.raises(RecipeError, match=r"holds neither test.jsonl nor main/test-"):
        get_custom_dataset("test", config)


def test_gsm8k_that_is_not_in_the_cache_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"nobody-has/gsm8k \(revision main\) is not in"):
        get_custom_dataset("train", DatasetConfig("hub-that-nobody-has/gsm8k"))


class Words:
    """A tokenizer as far as it is asked: a token a word."""

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def encode(self, text: str, **options: Any) -> list[str]:
        return text.split()


def test_longer_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "word " * n}]} for n in (2, 5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DatasetConfig(str(tmp_path), max_length=3)
    assert get_custom_dataset("train", config, Words()) == rows[:1]
    with pytest.raises(RecipeError, match="needs a tokenizer"):
        get_custom_dataset("train", config)
