"""Every kind of source gives its rows; what is missing is named, with what to do about it."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from areal_hpc.dataset.sources import iterate_rows, list_source_files
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig

SAMPLES = Path(__file__).parents[1] / "samples"
"""Made by `datasets` 5.2: `save_to_disk` and `to_parquet` of the same two rows."""
ANSWERS = ["She has 3+4=<<3+4=7>>7 clips.\n#### 7", "Two boxes hold 2*1200=<<2*1200=2400>>2400"]
COMMIT = "5f1e7ac0" * 5


def read(**config: Any) -> list[dict[str, Any]]:
    return list(iterate_rows(TaskSetConfig(**config), "train_dataset"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as `huggingface_hub` lays it out, with one data set of two files."""
    repo = tmp_path / "datasets--someone--sums"
    files = repo / "snapshots" / COMMIT / "main"
    files.mkdir(parents=True)
    for part in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        shutil.copy(SAMPLES / "gsm8k.parquet", files / f"{part}.parquet")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("path", [SAMPLES / "gsm8k.parquet", SAMPLES / "gsm8k_saved" / "train"])
def test_tables_are_read_row_by_row(path: Path) -> None:
    found = read(path=path)
    assert [row["answer"].startswith(a) for row, a in zip(found, ANSWERS, strict=True)] == [1, 1]
    assert list(found[0]) == ["question", "answer"]


def test_the_splits_of_a_saved_folder_are_named() -> None:
    with pytest.raises(RecipeError, match=r"has no state\.json") as refusal:
        read(path=SAMPLES / "gsm8k_saved")
    assert "gsm8k_saved/test" in refusal.value.problems[0].hint


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(RecipeError, match=r"x\.parquet cannot be read"):
        read(path=tmp_path / "x.parquet")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_the_files_of_a_hub_data_set_are_read_in_order(cache: Path, revision: str | None) -> None:
    config = {"hub": "someone/sums", "files": "main/train-*.parquet", "revision": revision}
    assert len(read(**config)) == 4
    names = [
        path.name[:11] for path in list_source_files(TaskSetConfig.model_validate(config), "x")
    ]
    assert names == ["train-00000", "train-00001"]


def test_what_is_not_in_the_cache_is_named_with_the_command_that_fetches_it(cache: Path) -> None:
    for wrong, key in (
        ({"hub": "someone/absent", "files": "*"}, "train_dataset.hub"),
        ({"hub": "someone/sums", "files": "*", "revision": "v2"}, "train_dataset.hub"),
        ({"hub": "someone/sums", "files": "other/*"}, "train_dataset.files"),
    ):
        with pytest.raises(RecipeError) as refusal:
            read(**wrong)
        assert refusal.value.problems[0].key == key
        assert "areal-hpc prefetch" in refusal.value.problems[0].hint


def test_reasoning_gym_is_a_source_by_name() -> None:
    found = read(reasoning_gym="chain_sum", kwargs={"size": 3, "seed": 5, "min_terms": 2})
    assert len(found) == 3
    assert found == read(reasoning_gym="chain_sum", kwargs={"size": 3, "seed": 5, "min_terms": 2})
    assert found[0]["metadata"]["source_dataset"] == "chain_sum"
    assert found[0]["messages"] == [{"role": "user", "content": found[0]["question"]}]
    with pytest.raises(RecipeError, match="no_such_task"):
        read(reasoning_gym="no_such_task", kwargs={"size": 1, "seed": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hub": "a/b"},
        {"path": "x", "files": "*"},
        {"hub": "a/../b", "files": "*"},
        {"reasoning_gym": "chain_sum", "kwargs": {"size": 3}},
        {"path": "x", "hub": "a/b", "files": "*"},
    ],
)
def test_keys_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TaskSetConfig.model_validate(wrong)


def test_rows_pass_the_function_that_makes_tasks_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up_forms.py").write_text(
        "def long(row): return {'q': row['question']} if '1,200' in row['question'] else None\n"
        "def wrong(row): return row['absent']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = SAMPLES / "gsm8k.parquet"
    kept = read(path=path, to_task="made_up_forms:long")
    assert kept == [{"q": "A box holds 1,200 nails. How many do two boxes hold?"}]
    with pytest.raises(RecipeError, match=r"row 0 \(KeyError: 'absent'\)") as refusal:
        read(path=path, to_task="made_up_forms:wrong")
    assert refusal.value.problems[0].key == "train_dataset.to_task"
