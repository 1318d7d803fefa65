"""Bad input is refused before anything starts: exit code 78, the place, and a next step."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_hpc.launch.tiny_model import build_tiny_config
from areal_hpc.recipe.recipe import TinyModelConfig
from tests.support.commands import exit_code_of, run_program
from tests.support.environments import CHECKOUT
from tests.support.small_run import LIGHT_AGENT

QUICKSTART = "recipes/quickstart.yaml"


NO_DATA = "train_dataset.generator=null train_dataset.path=data/none.jsonl"
OWN_DATA = "train_dataset.generator=null train_dataset.path=DIR/tasks.jsonl train_dataset.kwargs={}"
OWN_MODEL = "model.tiny=null model.path=DIR"
FOUR_RANKS = "trainer.parallel.dp=2 inference.replicas_per_cell=2 inference.tp=2"
ON_GPUS = "trainer.device=cuda inference.device=cuda"
SUMS = "tests.support.sums"

CASES = [
    # overrides (DIR has the files of the case), what is said
    # A misspelling on purpose: spelled right, the run starts and trains.
    ("trainer.optimzer.lr=1", "unknown key 'optimzer'", "did you mean optimizer?"),
    (
        f"{NO_DATA} cluster.serve.python=/no/such/python rollout.should_accept={SUMS}:no_such "
        f"rollout.curriculum={SUMS}:nothing",
        *("4 errors:", "there is no data set at", "at: train_dataset.path"),
        *("no Python interpreter for role serve at /no/such/python", "make setup"),
        *("at: rollout.should_accept", "no_such", "at: rollout.curriculum", "nothing"),
    ),
    (
        OWN_DATA,
        "row 1, limits: proxy.session_timeout_s=3600 is less than the 5400 s",
        "at: train_dataset",
    ),
    (f"train_dataset.generator={SUMS}:no_sums", "at: train_dataset.generator", "no_sums"),
    (f"rollout.workflow={SUMS}.SumAgnt", "at: rollout.workflow", "SumAgent"),
    ("rollout.workflow=no_such_package.agent.Agent", "at: rollout.workflow", "try:"),
    ("rollout.workflow=nodots", "at: rollout.workflow", "try:"),
    (
        f"{OWN_MODEL} trainer.parallel.tp=4 trainer.parallel.pp=3 trainer.parallel.dp=2",
        "num_key_value_heads 2 must be a multiple of tp 4",
        "num_hidden_layers 2 must be a multiple of pp 3",
        *("has no tokenizer.json", "copy the tokenizer files"),
    ),
    (f"{OWN_MODEL}/mamba", "model_type must be one of llama, qwen2, qwen3, qwen3_moe, got 'mamba'"),
    (
        "trainer.parallel.ep=2 trainer.parallel.dp=2",
        "at: trainer.parallel.ep",
        "the number of experts of a dense network, 1 must be a multiple of ep 2",
    ),
    (
        f"{FOUR_RANKS} {ON_GPUS} {NO_DATA}",
        "too few GPUs for the stage train: it needs 6 at once "
        "(trainer 2 ranks x 1 = 2, cell-0 2 replicas x tp 2 = 4), "
        "this machine shows 4 (CUDA_VISIBLE_DEVICES='3,5,7,9')",
        "there is no data set at",
    ),
    (
        "model.tiny=null model.path=/no/model rollout.workflow=nowhere.Agent "
        "valid_dataset.generator=null valid_dataset.path=/no/data.jsonl",
        "3 errors:",
    ),
]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder of tasks and of a model without tokenizer, and below it one of an odd model."""
    folder = tmp_path / "given"
    (folder / "mamba").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(build_tiny_config(TinyModelConfig())))
    (folder / "model.safetensors").touch()
    (folder / "mamba" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    tasks = [{"question": "2+2"}, {"question": "3+3", "limits": {"timeout_s": 1800}}]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return folder


@pytest.mark.parametrize(("overrides", "said"), [(one[0], one[1:]) for one in CASES])
def test_what_is_wrong_is_named_and_nothing_is_left_behind(
    overrides: str,
    said: Sequence[str],
    given: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    given_here = overrides.replace("DIR", str(given)).split()
    fileroot = f"cluster.fileroot={tmp_path}/runs"
    assert exit_code_of("run", QUICKSTART, fileroot, LIGHT_AGENT, *given_here) == 78
    shown = capfd.readouterr().err
    assert [part for part in said if part not in shown] == [], shown
    assert "stage sft" not in shown
    assert not list(tmp_path.glob("runs/quickstart/demo/jobs/*"))


def test_commands_say_what_they_do_plan_without_data_and_refuse_what_is_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    assert exit_code_of("--help") == 0
    assert "train a recipe on this machine" in capfd.readouterr().out
    sources = "{sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl}], generator: null}"
    assert exit_code_of("plan", QUICKSTART, f"train_dataset={sources}") == 0
    assert "ledger" in capfd.readouterr().out
    assert exit_code_of("status", tmp_path) == 78
    assert "there is no run at" in capfd.readouterr().err


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
        f"exec {sys.executable} -m areal_hpc run {QUICKSTART} cluster.fileroot={disk} {LIGHT_AGENT}"
    )
    answer = run_program("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)
    assert answer.returncode == 78, answer.stderr
    assert expected in answer.stderr
    assert "at: cluster.fileroot" in answer.stderr
