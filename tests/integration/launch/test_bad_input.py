"""Bad input is refused before anything starts, with exit code 78, the location, and a next step."""

import json
import sys
from pathlib import Path

import pytest

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.launch.tiny_model import TinySizes, build_tiny_architecture_config
from tests.support.chatml import write_model_dir
from tests.support.commands import exit_code_of, run_program
from tests.support.environments import CHECKOUT
from tests.support.mistakes import MISTAKES, QUICKSTART, Mistake
from tests.support.small_run import LIGHT_AGENT
from tests.support.thoroughness import choose

ALIKE = {
    "an option that SGLang does not have",  # acceptance/test_server_options asks its parser as well
    "several at once",
    "a model that is not supported",
    "an argument that a generator does not take",
    "a generator's module misspelled",
    "a generator misspelled",
    "expert parallelism without experts",
    "a task that may take longer than its session",
    "a data set without a row",
    "a reply longer than the context",
    "a file in place of a model's folder",
}
"""Mistakes that take seconds to find, each beside another mistake of the list."""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Make a folder of tasks and of a model without tokenizer, and below it one of an odd model."""
    folder = tmp_path / "given"
    (folder / "mamba").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(build_tiny_architecture_config(TinySizes())))
    (folder / "model.safetensors").touch()
    (folder / "mamba" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    quantized = write_model_dir(folder / "quantized")
    (quantized / "config.json").write_text(
        json.dumps(
            {
                **build_tiny_architecture_config(TinySizes()),
                "quantization_config": {"quant_method": "fp8"},
            }
        )
    )
    (quantized / "model.safetensors").touch()
    foreign = write_model_dir(folder / "foreign_tokenizer")
    config = {**build_tiny_architecture_config(TinySizes()), "vocab_size": 320}
    (foreign / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    (foreign / "model.safetensors").touch()
    tasks = [{"question": "2+2"}, {"question": "3+3", "limits": {"timeout_s": 1800}}]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "broken.jsonl").write_text('{"question": "2+2"}\n{"question": [\n')
    (folder / "empty.jsonl").touch()
    (folder / "model.gguf").touch()
    (folder / "unfinished.py").write_text("class Agent(:\n")
    (folder / "repeated.yaml").write_text("experiment_name: a\nexperiment_name: b\n")
    return folder


@pytest.mark.parametrize(
    "mistake",
    choose(MISTAKES, *(mistake for mistake in MISTAKES if mistake.what not in ALIKE)),
    ids=lambda mistake: mistake.what,
)
def test_what_is_wrong_is_named_and_nothing_is_left_behind(
    mistake: Mistake,
    given: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}:{given}")
    monkeypatch.syspath_prepend(given)
    words = f"{mistake.recipe} cluster.fileroot={tmp_path}/runs {LIGHT_AGENT} {mistake.overrides}"
    for name, path in (
        ("DIR", str(given)),
        ("SERVE_PYTHON", get_interpreter("serve", "auto")),
        ("TEST_PYTHON", sys.executable),
    ):
        words = words.replace(name, path)
    assert exit_code_of("run", *words.split()) == 78
    shown = capfd.readouterr().err
    assert [part for part in mistake.said if part not in shown] == [], shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()


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


DISKS = [("ro", "Read-only file system"), ("size=1m", "is full: 1 MiB free")]


@pytest.mark.parametrize(
    ("mount_options", "expected"),
    choose(DISKS, DISKS[1]),
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


def test_an_agent_that_runs_programs_is_refused_where_they_cannot_be_isolated(
    tmp_path: Path,
) -> None:
    """Users can allow it, as on a cluster whose administrators forbid user namespaces."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && "
    words = f"{QUICKSTART} cluster.fileroot={tmp_path}/runs rollout.workflow=examples.coding.agent."
    command = f"exec setpriv --inh-caps=-all --bounding-set=-all {sys.executable} -m areal_hpc "

    def run(words: str) -> str:
        script = f"{forbid}{command} {words}"
        answer = run_program("unshare", "--user", "--map-root-user", "sh", "-c", script)
        assert answer.returncode == (78 if words.startswith("run") else 0), answer.stderr
        return answer.stdout + answer.stderr

    refused = run(f"run {words}CodeAgent")
    assert "programs that the model wrote cannot be isolated on this machine" in refused
    assert "at: reward.isolation" in refused
    assert not (tmp_path / "runs").exists()
    refused = run(f"run {words}CodeAgent reward.isolation=none rollout.agent.isolation=bwrap")
    assert "programs that the model wrote" not in refused
    assert "bubblewrap cannot isolate on this machine" in refused
    assert "at: rollout.agent.isolation" in refused
    assert "rollout.agent.isolation=none" in refused
    assert not (tmp_path / "runs").exists()
