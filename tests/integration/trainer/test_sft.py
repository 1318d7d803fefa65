"""SFT as the launcher runs it: it learns, survives a stop, and leaves a usable model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths

ANSWERS = {"one": "1 2 3", "two": "2 4 6", "three": "3 6 9", "four": "4 8 12"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    data = tmp_path / "demonstrations.jsonl"
    with data.open("w") as stream:
        for question, answer in ANSWERS.items():
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    make_tiny_model(
        tmp_path / "model",
        [*ANSWERS, *ANSWERS.values()],
        hidden=64,
        head_dim=16,
        ffn=128,
        vocab=300,
    )
    path = tmp_path / "sft.json"
    path.write_text(
        json.dumps(
            {
                "run_dir": str(tmp_path / "run"),
                "model_path": str(tmp_path / "model"),
                "dataset_path": str(data),
                "seed": 3,
                "sft": {
                    "total_steps": 160,
                    "batch_size": 4,
                    "optimizer": {"lr": 1e-2, "warmup_steps": 5, "decay": "linear"},
                    "checkpoint_every_steps": 40,
                    "log_every_steps": 1,
                },
                "device": "cpu",
                "dtype": "float32",
            }
        )
    )
    (tmp_path / "run").mkdir()
    return path


def start(config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "areal_hpc.jobs.process_main",
            "areal_hpc.trainer.sft_job:run",
            config,
        ],
        env={**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())},
    )


def test_a_stopped_sft_stage_goes_on_and_learns_its_demonstrations(config: Path) -> None:
    paths = RunPaths(config.parent / "run")
    process = start(config)
    give_up_at = time.monotonic() + 60
    while len(read_lines(paths.sft_metrics)) < 50:
        assert process.poll() is None
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == STOPPED_EXIT_CODE
    stopped_at = read_lines(paths.sft_metrics)[-1]["step"]
    assert 50 <= stopped_at < 160
    assert not paths.sft_export.exists()

    assert start(config).wait(timeout=90) == 0
    rows = read_lines(paths.sft_metrics)
    assert [row["step"] for row in rows] == list(range(1, 161))
    assert rows[-1]["loss"] < 0.02 < 1.0 < rows[0]["loss"]
    checkpoints = sorted(path.name for path in paths.sft_dir.iterdir())
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
