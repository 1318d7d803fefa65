"""Scripts in the form of AReaL's guides, run to the end of a training by AReaL's launcher."""

import json
import os
from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.chatml import make_talking_model
from tests.support.commands import audit_of, run_program
from tests.support.environments import CHECKOUT, python_of
from tests.support.run_files import logs_of
from tests.support.small_run import processes_of

SCRIPTS = {
    "agent_workflow/train.py": "main",
    "openai_agents/train_agents.py": "main",
    "camel/train.py": "camel",
}
"""Script of `examples`, and the environment that has its framework."""
TASKS = [
    {"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)}
    for n in range(1, 5)
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_guides_trains(name: str, tmp_path: Path) -> None:
    script = CHECKOUT / "examples" / name
    python = python_of(SCRIPTS[name])
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    launcher = (python, "-m", "areal_hpc.areal.launcher.local", script)
    settings = ("--config", script.with_name("config.yaml"), *make_small(tmp_path))
    answer = run_program(*launcher, *settings, environ=environ, timeout_s=360)
    paths = RunPaths(tmp_path / "guide" / "trial")
    assert answer.returncode == 0, answer.stdout + answer.stderr + logs_of(paths)
    steps = [row["step"] for row in read_readable_records(paths.metrics)]
    assert steps == [0, 1], answer.stdout
    assert audit_of(paths.root) == "trained_once=1 duplicates=0 lost=0 open=0"
    assert processes_of(paths.root) == []


def make_small(folder: Path) -> list[str]:
    """A model that writes text and ends, tasks, and overrides by which a configuration is small."""
    model_dir, data_dir = folder / "model", folder / "data"
    make_talking_model(model_dir)
    data_dir.mkdir()
    for split in ("train", "test"):
        (data_dir / f"{split}.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    return [
        *("experiment_name=guide", "trial_name=trial"),
        *(f"cluster.fileroot={folder}", f"actor.path={model_dir}"),
        *(f"train_dataset.path={data_dir}", f"valid_dataset.path={data_dir}"),
        *("cluster.n_gpus_per_node=1", "rollout.backend=sglang:d1", "actor.backend=megatron:d1"),
        *("actor.dtype=float32", "sglang.dtype=float32", "sglang.max_total_tokens=16384"),
        *("total_train_steps=1", "train_dataset.batch_size=1", "gconfig.n_samples=2"),
        *("rollout.max_concurrent_rollouts=2", "rollout.max_head_offpolicyness=0"),
        *("gconfig.max_new_tokens=64", "gconfig.max_tokens=4096"),
    ]
