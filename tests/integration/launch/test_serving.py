"""`areal-hpc start` on a model: real SGLang on the CPU, the proxy, and a program of a person."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from areal_hpc.errors import ClusterError
from areal_hpc.launch.prepare import write_run_recipe
from areal_hpc.launch.serving import build_serving_recipe
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.state.run_view import RunView
from areal_hpc.wire.trajectory import RowKind
from tests.support.chatml import TRAINING_TEXT
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.process_commands import command_of

START = [sys.executable, "-m", "areal_hpc", "start"]
PROGRAM = """
from openai import OpenAI

with OpenAI(max_retries=0) as client:
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    reply = client.chat.completions.create(model="default", messages=messages, max_tokens=9)
print("tokens", reply.usage.completion_tokens)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny_model(folder, TRAINING_TEXT)
    return folder


def test_a_model_is_served_until_ctrl_c_and_the_verdict_is_kept(
    model: Path, tmp_path: Path
) -> None:
    person = subprocess.Popen(
        [*START, "--print-env", str(model)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert person.stdin is not None
    assert person.stdout is not None
    try:
        output, variables = "", dict[str, str]()
        while "press Enter" not in (line := person.stdout.readline()):
            output += line
            assert line, output
            name, found, value = line.removeprefix("export ").strip().partition("=")
            variables |= {name: value} if found else {}
        program = [sys.executable, "-c", PROGRAM]
        said = subprocess.check_output(program, text=True, env={**os.environ, **variables})
        person.send_signal(signal.SIGINT)
        while not output.endswith("for none: "):
            output += person.stdout.read(1)
        output += person.communicate("7\nfine\n", timeout=scaled(60))[0]
    finally:
        person.kill()
        person.wait()
    assert person.returncode == 0, output
    (run,) = (RunPaths(folder) for folder in tmp_path.glob("runs/start/tiny-*"))
    assert f"records  {run.root}\n" in output
    assert "replies: 1, reward 0.778: kept" in output
    (shard,) = read_index(run.shard_index_dir)
    (row,) = ShardReader(run.shards_dir / shard.file).read_rows([0])
    assert row.kind is RowKind.PERSONAL
    assert row.reward == pytest.approx(7 / 9)
    assert RunView(run).total_steps == 0
    assert said == f"tokens {int(row.loss_mask_T.sum())}\n"
    assert not [p for p in psutil.process_iter() if str(model) in command_of(p)]


def test_a_server_without_memory_is_given_up(model: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise MemoryError('no room for the weights')")
    recipe = {
        "experiment_name": "chat",
        "trial_name": "first",
        "cluster": {
            "fileroot": str(tmp_path),
            "serve": {"variables": {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}},
        },
        "model": {"path": "another"},
        "trainer": {"device": "cpu", "dtype": "float32"},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    ended = subprocess.run(
        [*START, str(model), "--recipe", str(file), "--", "true"],
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert ended.returncode == ClusterError.exit_code, ended.stderr
    assert "SGLang ended 2 times as it started" in ended.stderr
    assert "MemoryError: no room for the weights" in ended.stderr


def test_an_export_is_served_as_its_run_served(model: Path, tmp_path: Path) -> None:
    recorded = load_recipe(CHECKOUT / "recipes" / "cpu_harness.yaml")
    run = RunPaths(tmp_path)
    write_run_recipe(recorded, run.recipe)
    export = shutil.copytree(model, run.export_dir("step_000020"))
    recipe = build_serving_recipe(export)
    assert recipe.model.path == export
    assert recipe.trial_name.startswith("step_000020-")
    assert recipe.inference == recorded.inference
    assert recipe.rollout.sampling == recorded.rollout.sampling
    assert build_serving_recipe(model).inference == InferenceConfig()
