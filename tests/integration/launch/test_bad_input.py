"""Bad input is refused before anything starts: exit code 78, the place, and a next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.recipe import TinyModelConfig
from areal_hpc.tiny_model import tiny_config
from tests.support.environments import CHECKOUT

QUICKSTART = "recipes/quickstart.yaml"


def areal_hpc(
    *arguments: str, cwd: Path = CHECKOUT, gpus: str | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_hpc", *arguments]
    environ = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=110, env=environ
    )


def refused(tmp_path: Path, *overrides: str, gpus: str | None = None) -> str:
    """What the launcher says; asserts that it refused and left no job behind."""
    fileroot = f"cluster.fileroot={tmp_path / 'runs'}"
    answer = areal_hpc("run", QUICKSTART, fileroot, *overrides, gpus=gpus)
    assert answer.returncode == 78, answer.stderr + answer.stdout
    assert not list(tmp_path.glob("runs/quickstart/demo/jobs/*"))
    assert "Traceback" not in answer.stderr
    return answer.stderr


def test_unknown_key(tmp_path: Path) -> None:
    said = refused(tmp_path, "trainer.optimiser.lr=1")
    assert "unknown key 'optimiser'" in said
    assert "did you mean optimizer?" in said


def test_wrong_type(tmp_path: Path) -> None:
    said = refused(tmp_path, "trainer.batch_size=big")
    assert "at: trainer.batch_size" in said
    assert "'big'" in said


def test_missing_dataset(tmp_path: Path) -> None:
    said = refused(tmp_path, "train_dataset.generator=null", "train_dataset.path=data/none.jsonl")
    assert "there is no data set at" in said
    assert "at: train_dataset.path" in said


def test_a_task_whose_episodes_outlast_their_sessions(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "2+2"}\n{"question": "3+3", "limits": {"timeout_s": 1800}}\n')
    said = refused(tmp_path, "train_dataset.generator=null", f"train_dataset.path={tasks}",
                   "train_dataset.kwargs={}")  # fmt: skip
    assert "row 1, limits: proxy.session_timeout_s=3600 is less than the 5400 s" in said
    assert "at: train_dataset" in said


def test_a_generator_that_does_not_import(tmp_path: Path) -> None:
    said = refused(tmp_path, "train_dataset.generator=examples.quickstart.task:no_such_tasks")
    assert "at: train_dataset.generator" in said
    assert "no_such_tasks" in said


@pytest.mark.parametrize(
    "workflow",
    ["examples.quickstart.agent.ArithmeticAgnt", "no_such_package.agent.Agent", "nodots"],
)
def test_agent_path_that_does_not_import(tmp_path: Path, workflow: str) -> None:
    said = refused(tmp_path, f"rollout.workflow={workflow}")
    assert "at: rollout.workflow" in said
    assert "try:" in said


def test_agent_misspelt_names_the_nearest_class(tmp_path: Path) -> None:
    said = refused(tmp_path, "rollout.workflow=examples.quickstart.agent.ArithmeticAgnt")
    assert "ArithmeticAgent" in said


def test_model_directory_without_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_key_value_heads": 2}))
    (model / "model.safetensors").write_bytes(b"")
    said = refused(tmp_path, "model.tiny=null", f"model.path={model}")
    assert "has no tokenizer.json" in said
    assert "copy the tokenizer files" in said


def test_a_model_that_does_not_split_as_asked(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config(**TinyModelConfig().model_dump())))
    split = ("trainer.parallel.tp=4", "trainer.parallel.pp=3", "trainer.parallel.dp=2")
    said = refused(tmp_path, "model.tiny=null", f"model.path={model}", *split)
    assert "num_key_value_heads 2 must be a multiple of tp 4" in said
    assert "num_hidden_layers 2 must be a multiple of pp 3" in said


def test_a_network_that_is_not_known(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    said = refused(tmp_path, "model.tiny=null", f"model.path={model}")
    assert "model_type must be one of llama, qwen2, qwen3, qwen3_moe, got 'mamba'" in said


def test_a_tiny_model_that_does_not_split_as_asked(tmp_path: Path) -> None:
    said = refused(tmp_path, "trainer.parallel.ep=2", "trainer.parallel.dp=2")
    assert "at: trainer.parallel.ep" in said
    assert "the number of experts of a dense network, 1 must be a multiple of ep 2" in said


def test_batch_sizes_that_do_not_divide(tmp_path: Path) -> None:
    said = refused(tmp_path, "trainer.batch_size=10", "trainer.minibatches=4")
    assert "batch_size=10 tickets do not divide into minibatches=4" in said


def test_a_machine_with_too_few_gpus_is_told_with_whatever_else_is_wrong(tmp_path: Path) -> None:
    shape = ("trainer.parallel.dp=2", "inference.replicas_per_cell=2", "inference.tp=2")
    devices = ("trainer.device=cuda", "inference.device=cuda")
    missing = ("train_dataset.generator=null", "train_dataset.path=data/none.jsonl")
    said = refused(tmp_path, *shape, *devices, *missing, gpus="3,5,7,9")
    assert (
        "too few GPUs for the stage train: it needs 6 at once "
        "(trainer 2 ranks x 1 = 2, cell-0 2 replicas x tp 2 = 4), "
        "this machine shows 4 (CUDA_VISIBLE_DEVICES='3,5,7,9')"
    ) in said
    assert "stage warmup" not in said
    assert "there is no data set at" in said


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    said = refused(tmp_path, "cluster.serve.python=/no/such/python")
    assert "no Python for the role serve at /no/such/python" in said
    assert "make setup" in said


@pytest.mark.parametrize(
    ("mount_options", "expected"),
    [("ro", "Read-only file system"), ("size=1m", "is full: 1 MiB free")],
)
def test_full_or_read_only_run_directory(mount_options: str, expected: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # A mount namespace of its own: real file-system errors, no privileges, nothing to clean up.
    script = (
        f"mount -t tmpfs -o {mount_options} none {disk} && "
        f"exec {sys.executable} -m areal_hpc run {QUICKSTART} cluster.fileroot={disk}"
    )
    answer = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=110,
        env=dict(os.environ),
    )
    assert answer.returncode == 78, answer.stderr
    assert expected in answer.stderr
    assert "at: cluster.fileroot" in answer.stderr


def test_all_missing_things_are_reported_together(tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        "model.tiny=null",
        "model.path=/no/model",
        "rollout.workflow=nowhere.Agent",
        "valid_dataset.generator=null",
        "valid_dataset.path=/no/data.jsonl",
    )
    assert "3 errors:" in said


def test_help_lists_the_commands() -> None:
    answer = areal_hpc("--help")
    assert answer.returncode == 0
    assert "train a recipe in the foreground" in answer.stdout


def test_a_recipe_of_several_sources_is_planned_without_them() -> None:
    sources = "{sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl}], generator: null}"
    answer = areal_hpc("plan", QUICKSTART, f"train_dataset={sources}")
    assert answer.returncode == 0, answer.stderr
    assert "ledger" in answer.stdout


def test_status_of_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    answer = areal_hpc("status", str(tmp_path))
    assert answer.returncode == 78
    assert "there is no run at" in answer.stderr


def test_a_filter_of_groups_that_does_not_import_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "rollout.should_accept=examples.quickstart.agent:no_such_filter")
    assert "at: rollout.should_accept" in said
    assert "no_such_filter" in said


def test_a_curriculum_that_does_not_import_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "rollout.curriculum=examples.quickstart.agent:no_such_weights")
    assert "at: rollout.curriculum" in said
    assert "no_such_weights" in said
