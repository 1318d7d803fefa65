"""The SFT stage learns, survives a stop, and leaves a usable model."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, mark_cancelled
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer, TaskExit
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


def train(ranks: RankServer, paths: RunPaths, **scenario: Any) -> TaskExit:
    optimizer = {"lr": 1e-2, "warmup_steps": 5, "decay": "linear"}
    config = sft_config(
        paths.root, ANSWERS, total_steps=160, batch_size=4, optimizer=optimizer,
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
    )  # fmt: skip
    return ranks.run(paths, "run", entry="areal_hpc.trainer.sft:run", config=config, **scenario)


def stop_in_step(ranks: RankServer, paths: RunPaths, step: int) -> None:
    gate, held_mark = paths.root / "gate", paths.root / "gate.held"
    gate.touch()
    faults = f"optimizer.before_step@{step}=hold:{gate}"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(train, ranks, paths, faults=faults)
        try:
            wait_for(lambda: running.done() or (held_mark.exists() and held_mark.read_text()))
            assert not running.done(), running.result().log
            os.kill(int(held_mark.read_text()), signal.SIGTERM)
        finally:
            gate.unlink()
        stopped = running.result()
    assert stopped.codes == [STOPPED_EXIT_CODE], stopped.log
    assert read_readable_records(paths.sft_metrics)[-1]["step"] == step
    assert not paths.sft_export.exists()


@pytest.mark.thorough
def test_a_stopped_sft_stage_of_a_run_that_is_cancelled_at_once_saves_nothing(
    ranks: RankServer, paths: RunPaths
) -> None:
    mark_cancelled(paths.cancelled_marker, without_checkpoint=True)
    stop_in_step(ranks, paths, 45)
    assert [path.name for path in paths.sft_checkpoints_dir.iterdir()] == ["step_00000040"]


def test_a_stopped_sft_stage_goes_on_and_learns_its_demonstrations(
    ranks: RankServer, paths: RunPaths
) -> None:
    stop_in_step(ranks, paths, 50)
    finished = train(ranks, paths)
    assert finished.codes == [0], finished.log
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
        ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
        reply = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert reply == answer
