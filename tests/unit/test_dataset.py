"""Task sets are checked when they are made, before any episode."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from areal_hpc.dataset.sources import (
    count_materialized_rows,
    iterate_task_rows,
    list_source_paths,
    materialize_task_sets,
)
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig, TrainTaskSetConfig

SAMPLES = Path(__file__).parents[1] / "samples"
"""Output of `save_to_disk` and `to_parquet` of `datasets` 5.2, from the same two rows."""
ANSWERS = ["She has 3+4=<<3+4=7>>7 clips.\n#### 7", "Two boxes hold 2*1200=<<2*1200=2400>>2400"]
COMMIT = "5f1e7ac0" * 5
GOOD: dict[str, Any] = {"generator": "made_up_tasks:good"}


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a user: generators, and converters of rows to tasks."""
    (tmp_path / "made_up_tasks.py").write_text(
        "def good(size): return ({'n': i} for i in range(size))\n"
        "def empty(): return []\n"
        "def breaks(): yield {'n': 1}; raise ValueError('out of questions')\n"
        "def bare(): return [1, 2]\n"
        "def odd(): yield {'n': object()}\n"
        "def long(row): return {'q': row['question']} if '1,200' in row['question'] else None\n"
        "def wrong(row): return row['absent']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache as `huggingface_hub` lays it out, with one data set of two files."""
    repo = tmp_path / "datasets--someone--sums"
    files = repo / "snapshots" / COMMIT / "main"
    files.mkdir(parents=True)
    for part in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        shutil.copy(SAMPLES / "gsm8k.parquet", files / f"{part}.parquet")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


def read(**config: Any) -> list[dict[str, Any]]:
    return list(iterate_task_rows(TaskSetConfig(**config), "train_dataset"))


def test_a_generator_is_written_as_json_lines(functions: None, tmp_path: Path) -> None:
    out = tmp_path / "data" / "train.jsonl"
    config = TaskSetConfig(**GOOD, kwargs={"size": 3})
    assert materialize_task_sets([(config, "train_dataset")], out) == [3]
    assert count_materialized_rows(out) == 3
    assert read(path=out) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_several_sources_are_written_one_after_another(functions: None, tmp_path: Path) -> None:
    sources = [{**GOOD, "kwargs": {"size": 2}}, {**GOOD, "kwargs": {"size": 1}, "weight": 3.0}]
    config = TrainTaskSetConfig.model_validate({"sources": sources})
    out = tmp_path / "train.jsonl"
    assert materialize_task_sets(config.list_sources("train_dataset"), out) == [2, 1]
    assert read(path=out) == [{"n": 0}, {"n": 1}, {"n": 0}]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"generator": "made_up_tasks:empty"}, "made_up_tasks:empty gave no row"),
        ({"generator": "made_up_tasks:breaks"}, "ValueError: out of questions"),
        ({"generator": "made_up_tasks:odd"}, "row 0 cannot be serialized as JSON"),
        ({"generator": "made_up_tasks:absent"}, "has no 'absent'"),
        ({"generator": "nowhere_at_all:x"}, "there is no module 'nowhere_at_all'"),
        ({"generator": "nocolon"}, "expected `package.module:function`"),
        ({"generator": "made_up_tasks:bare"}, "row 0 is a int, expected a dict"),
        ({**GOOD, "kwargs": {"size": 3}}, "row 2, n: it is two"),
    ],
)
def test_the_source_at_fault_is_named_and_leaves_no_file(
    functions: None, tmp_path: Path, wrong: dict[str, Any], complaint: str
) -> None:
    def check(row: dict[str, Any]) -> None:
        if row["n"] == 2:
            raise RecipeError("it is two", key="n")

    second = {"sources": [{**GOOD, "kwargs": {"size": 2}}, wrong]}
    for config, key in ((wrong, "train_dataset"), (second, "train_dataset.sources.1")):
        parts = TrainTaskSetConfig.model_validate(config).list_sources("train_dataset")
        with pytest.raises(RecipeError, match=complaint) as refusal:
            materialize_task_sets(parts, tmp_path / "train.jsonl", check)
        assert refusal.value.problems[0].key == f"{key}.generator"
        assert list(tmp_path.glob("*.jsonl*")) == []


@pytest.mark.parametrize("path", [SAMPLES / "gsm8k.parquet", SAMPLES / "gsm8k_saved" / "train"])
def test_tables_are_read_row_by_row(path: Path) -> None:
    rows = read(path=path)
    assert [row["answer"].startswith(a) for row, a in zip(rows, ANSWERS, strict=True)] == [1, 1]
    assert list(rows[0]) == ["question", "answer"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("bad.jsonl", "{broken\n", "bad.jsonl:1:2 is not JSON"),
        ("bad.jsonl", "[1]\n", "holds list"),
        ("bad.jsonl", '{"n": "\udcff"}\n', r"bad\.jsonl cannot be read: .*utf-8"),
        ("bad.parquet", "not parquet", r"bad\.parquet cannot be read"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(RecipeError, match=complaint):
        read(path=tmp_path / name)


def test_the_splits_of_a_saved_folder_are_named() -> None:
    with pytest.raises(RecipeError, match=r"has no state\.json") as refusal:
        read(path=SAMPLES / "gsm8k_saved")
    assert "gsm8k_saved/test" in refusal.value.problems[0].hint


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_the_files_of_a_hub_data_set_are_read_in_order(cache: None, revision: str) -> None:
    config = {"hub": f"someone/sums{revision}/main/train-*.parquet"}
    assert len(read(**config)) == 4
    files = list_source_paths(TaskSetConfig.model_validate(config), "x")
    assert [path.name[:11] for path in files] == ["train-00000", "train-00001"]


@pytest.mark.parametrize(
    "hub",
    [
        "someone/absent/*",
        "someone/sums@v2/*",
        "someone/sums@refs/convert/parquet/*",
        "someone/sums/other/*",
    ],
)
def test_what_is_not_cached_is_named_with_what_fetches_it(cache: None, hub: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        read(hub=hub)
    assert refusal.value.problems[0].key == "train_dataset.hub"
    assert "areal-hpc prefetch" in refusal.value.problems[0].hint


def test_a_generator_makes_tasks_of_reasoning_gym() -> None:
    generator = "areal_hpc.dataset.adapters:make_reasoning_tasks"
    wanted = {"name": "chain_sum", "size": 3, "seed": 5, "min_terms": 2}
    rows = read(generator=generator, kwargs=wanted)
    assert len(rows) == 3
    assert rows == read(generator=generator, kwargs=wanted)
    assert rows[0]["metadata"]["source_dataset"] == "chain_sum"
    assert rows[0]["messages"] == [{"role": "user", "content": rows[0]["question"]}]
    with pytest.raises(RecipeError, match="no_such_task"):
        read(generator=generator, kwargs={"name": "no_such_task", "size": 1, "seed": 1})
    with pytest.raises(RecipeError, match="'seed'"):
        read(generator=generator, kwargs={"name": "chain_sum", "size": 1})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one"),
        ({"generator": "a:b", "sources": [{"generator": "c:d"}]}, "exactly one"),
        ({"path": "x", "hub": "a/b/*"}, "exactly one"),
        ({"hub": "a/b"}, "OWNER/NAME/FILES"),
        ({"hub": "../b/*"}, "OWNER/NAME/FILES"),
        ({"sources": [{"path": "x"}], "to_task": "a:b"}, "each of `sources` has a `to_task`"),
        ({"sources": [{"path": "x", "name": "a"}] * 2}, "two of `sources` have the name a"),
        (
            {"sources": [{"path": "x"}, {"path": "y", "workflow_kwargs": {"depth": 1}}]},
            "source 1 has workflow_kwargs without a workflow",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainTaskSetConfig.model_validate(wrong)


def test_rows_pass_the_function_that_makes_tasks_of_them(functions: None) -> None:
    path = SAMPLES / "gsm8k.parquet"
    kept = read(path=path, to_task="made_up_tasks:long")
    assert kept == [{"q": "A box holds 1,200 nails. How many do two boxes hold?"}]
    with pytest.raises(RecipeError, match="row 0: KeyError: 'absent'") as refusal:
        read(path=path, to_task="made_up_tasks:wrong")
    assert refusal.value.problems[0].key == "train_dataset.to_task"
