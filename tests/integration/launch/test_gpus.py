"""What the processes of `areal-hpc run` see of the machine's GPUs: real jobs, made-up GPUs."""

import sys
from pathlib import Path

import pytest

from tests.support.made_up_gpus import (
    RECORDER,
    check_servers_get_gpus_of_their_own,
    list_recipes_of_one_node,
    recipe_of,
    start_stage,
)

OUTER = "3,5,7,9"


@pytest.mark.parametrize(
    ("device", "shape", "expected"),
    [
        (
            "cuda",
            ("trainer.parallel.dp=2", "inference.replicas_per_cell=2"),
            {"trainer.0": "3", "trainer.1": "5", "inference.0": "7,9"},
        ),
        pytest.param(
            "auto",
            ("inference.tp=2", "inference.nodes_per_replica=2"),
            {"trainer.0": "3", "inference.0": "5", "follower.1": "7"},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_each_process_sees_its_own_gpus_of_those_that_the_launcher_sees(
    device: str,
    shape: tuple[str, ...],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", OUTER)
    (tmp_path / "seen").mkdir()
    (tmp_path / "recorder.py").write_text(RECORDER)
    recipe = recipe_of(tmp_path, f"trainer.device={device}", *shape)
    start_stage(recipe, tmp_path, serve_python=sys.executable)
    seen = {path.name: path.read_text() for path in (tmp_path / "seen").iterdir()}
    without = {"ledger.0": "", "proxy.0": "", "driver.0": ""}
    assert seen == without | expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", list_recipes_of_one_node())
def test_each_recipe_of_one_node_starts_its_servers_on_gpus_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_servers_get_gpus_of_their_own(name, tmp_path, monkeypatch)
