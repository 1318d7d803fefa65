"""Task sets are checked when they are made, not when an episode trips over them."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.dataset.materialize import count_rows, materialize
from areal_hpc.dataset.sources import iterate_rows
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig, TrainTaskSetConfig


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_tasks.py").write_text(
        "def good(size): return ({'n': i} for i in range(size))\n"
        "def empty(): return []\n"
        "def breaks(): yield {'n': 1}; raise ValueError('out of questions')\n"
        "def odd(): yield {'n': object()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_generator_is_written_as_json_lines(generators: None, tmp_path: Path) -> None:
    out = tmp_path / "data" / "train.jsonl"
    config = TaskSetConfig(generator="made_up_tasks:good", kwargs={"size": 3})
    assert materialize([(config, "train_dataset")], out) == [3]
    assert count_rows(out) == 3
    assert list(iterate_rows(TaskSetConfig(path=out), "train_dataset")) == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
    ]


@pytest.mark.parametrize(
    ("generator", "complaint"),
    [
        ("made_up_tasks:empty", "the data set is empty"),
        ("made_up_tasks:breaks", "ValueError: out of questions"),
        ("made_up_tasks:odd", "row 0 cannot be serialized as JSON"),
        ("made_up_tasks:absent", "AttributeError"),
        ("nowhere_at_all:x", "ModuleNotFoundError"),
        ("nocolon", "expected `package.module:function`"),
    ],
)
def test_a_broken_generator_is_named_and_leaves_no_file(
    generators: None, tmp_path: Path, generator: str, complaint: str
) -> None:
    out = tmp_path / "train.jsonl"
    with pytest.raises(RecipeError, match=complaint):
        materialize([(TaskSetConfig(generator=generator), "train_dataset")], out)
    assert not out.exists()


def test_a_row_that_does_not_pass_is_named_and_leaves_no_file(
    generators: None, tmp_path: Path
) -> None:
    def check(row: dict[str, Any]) -> None:
        if row["n"] == 2:
            raise RecipeError("it is two", key="n")

    out = tmp_path / "train.jsonl"
    config = TaskSetConfig(generator="made_up_tasks:good", kwargs={"size": 3})
    with pytest.raises(RecipeError, match="row 2, n: it is two") as refusal:
        materialize([(config, "train_dataset")], out, check)
    assert refusal.value.problems[0].key == "train_dataset"
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "complaint"), [("{broken\n", "bad.jsonl:1 is not JSON"), ("[1]\n", "holds list")]
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(RecipeError, match=complaint):
        list(iterate_rows(TaskSetConfig(path=path), "train_dataset"))


def test_exactly_one_source_is_demanded() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        TaskSetConfig()
    for wrong in ({}, {"generator": "a:b", "sources": [{"generator": "c:d"}]}):
        with pytest.raises(ValueError, match="exactly one"):
            TrainTaskSetConfig.model_validate(wrong)


def test_several_sources_are_written_one_after_another(generators: None, tmp_path: Path) -> None:
    good = {"generator": "made_up_tasks:good"}
    sources = [{**good, "kwargs": {"size": 2}}, {**good, "kwargs": {"size": 1}, "weight": 3.0}]
    config = TrainTaskSetConfig.model_validate({"sources": sources})
    out = tmp_path / "train.jsonl"
    assert materialize(config.parts("train_dataset"), out) == [2, 1]
    assert list(iterate_rows(TaskSetConfig(path=out), "")) == [{"n": 0}, {"n": 1}, {"n": 0}]


def test_the_source_at_fault_is_named(generators: None, tmp_path: Path) -> None:
    good = {"generator": "made_up_tasks:good", "kwargs": {"size": 2}}
    config = TrainTaskSetConfig.model_validate(
        {"sources": [good, {"generator": "made_up_tasks:empty"}]}
    )
    out = tmp_path / "train.jsonl"
    with pytest.raises(RecipeError, match=r"train_dataset\.sources\.1"):
        materialize(config.parts("train_dataset"), out)
    assert list(tmp_path.glob("*.jsonl*")) == []
