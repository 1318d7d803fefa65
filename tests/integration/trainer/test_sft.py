"""SFT as the launcher runs it: it learns, survives a stop, and leaves a usable model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from areal_hpc.jobs.processes.process_main import PROCESS_MAIN
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.cancellation import mark_cancelled
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.recorded_run import sft_config
from tests.support.waiting import wait_for

ANSWERS = {"one": "1 2 3", "two": "2 4 6", "three": "3 6 9", "four": "4 8 12"}

CHECKPOINT_EVERY_STEPS = 40


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    make_tiny_model(
        paths.starting_model_dir, [*ANSWERS, *ANSWERS.values()], hidden=64, head_dim=16, ffn=128,
        vocab=300,
    )  # fmt: skip
    return paths


def start(paths: RunPaths) -> subprocess.Popen[bytes]:
    config = paths.root / "sft.json"
    optimizer = {"lr": 1e-2, "warmup_steps": 5, "decay": "linear"}
    settings = sft_config(
        paths.root, ANSWERS, total_steps=160, batch_size=4, optimizer=optimizer,
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS, log_every_steps=1,
    )  # fmt: skip
    config.write_text(json.dumps(settings))
    return subprocess.Popen(
        [sys.executable, "-m", PROCESS_MAIN, "areal_hpc.trainer.sft.sft_job:run", config],
        env={**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())},
    )  # fmt: skip


@pytest.mark.thorough
def test_a_stopped_sft_stage_of_a_run_that_is_cancelled_at_once_saves_nothing(
    paths: RunPaths,
) -> None:
    mark_cancelled(paths.cancelled_marker, without_checkpoint=True)
    process = start(paths)
    wait_for(lambda: len(read_readable_records(paths.sft_metrics)) >= 45)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=scaled(60)) == STOPPED_EXIT_CODE
    steps = [int(path.name.removeprefix("step_")) for path in paths.sft_checkpoints_dir.iterdir()]
    assert steps
    assert all(step % CHECKPOINT_EVERY_STEPS == 0 for step in steps)


def test_a_stopped_sft_stage_goes_on_and_learns_its_demonstrations(paths: RunPaths) -> None:
    process = start(paths)

    def has_trained_50_steps() -> bool:
        assert process.poll() is None
        return len(read_readable_records(paths.sft_metrics)) >= 50

    wait_for(has_trained_50_steps)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=scaled(60)) == STOPPED_EXIT_CODE
    stopped_at = read_readable_records(paths.sft_metrics)[-1]["step"]
    assert 50 <= stopped_at < 160
    assert not paths.sft_export.exists()

    assert start(paths).wait(timeout=scaled(90)) == 0
    rows = read_readable_records(paths.sft_metrics)
    assert [row["step"] for row in rows] == list(range(1, 161))
    assert rows[-1]["loss"] < 0.02 < 1.0 < rows[0]["loss"]
    checkpoints = sorted(path.name for path in paths.sft_checkpoints_dir.iterdir())
    assert checkpoints == ["step_00000120", "step_00000160"]

    exported = paths.sft_export
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for question, answer in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        said = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
        reply = tokenizer.decode(said[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert reply == answer
