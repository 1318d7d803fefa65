"""The SFT stage learns, survives a stop, and leaves a usable model."""

import os
import shutil
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.dataset.demonstrations import parse_demonstration
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, mark_cancelled
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.demonstration_rows import DemonstrationTokenizer
from areal_hpc.trainer.sft import get_batch_indices
from tests.support.float64_trainer import (
    Float64Trainer,
    compute_cross_entropy,
    load_float64_model,
)
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


def train(
    ranks: RankServer, paths: RunPaths, sft: Mapping[str, Any] | None = None, **scenario: Any
) -> TaskExit:
    optimizer = {"lr": 1e-2, "warmup_steps": 5, "decay": "linear"}
    config = sft_config(
        paths.root, ANSWERS, optimizer=optimizer,
        **{
            "batch_size": 4, "total_steps": 160,
            "checkpoint_every_steps": CHECKPOINT_EVERY_STEPS, **(sft or {}),
        },
    )  # fmt: skip
    return ranks.run(paths, "run", entry="areal_hpc.trainer.sft:run", config=config, **scenario)


def stop_in_step(
    ranks: RankServer, paths: RunPaths, step: int, sft: Mapping[str, Any] | None = None
) -> None:
    gate, held_mark = paths.root / "gate", paths.root / "gate.held"
    gate.touch()
    faults = f"optimizer.before_step@{step}=hold:{gate}"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(train, ranks, paths, sft, faults=faults)
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


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": f"two and {word}"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": word},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": f"{answer} 9"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    }
    for word, answer in ANSWERS.items()
]


@pytest.mark.parametrize("parallel", [{}, {"dp": 2}, {"tp": 2}, {"cp": 2}])
def test_three_steps_are_those_of_a_float64_reference(
    ranks: RankServer, paths: RunPaths, parallel: dict[str, int]
) -> None:
    optimizer: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 1, "decay": "cosine"}
    config = sft_config(
        paths.root, CONVERSATIONS, parallel, total_steps=3, batch_size=3, optimizer=optimizer
    )
    entry = "areal_hpc.trainer.sft:run"
    size = max([1, *parallel.values()])
    finished = ranks.run(paths, "run", size, entry=entry, config=config)
    assert finished.codes == [0] * size, finished.log

    tokenizer = DemonstrationTokenizer(paths.starting_model_dir)
    adam = AdamConfig(**{**optimizer, "weight_decay": 0.01})
    reference = Float64Trainer(
        paths.starting_model_dir, ObjectiveConfig(), adam, steps=3, minibatches=1
    )
    for step, row in enumerate(read_readable_records(paths.sft_metrics)):
        chosen = get_batch_indices(step, 3, len(CONVERSATIONS), seed=3)
        rows = tokenizer.build_rows([parse_demonstration(CONVERSATIONS[i]) for i in chosen])
        loss, norm = reference.fine_tune(rows)
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert (row["rows"], row["rows/rewritten"]) == (3, 0)


def test_an_adapter_is_judged_merged_and_resumed_to_the_same_bits(
    ranks: RankServer, paths: RunPaths
) -> None:
    sft = {
        "total_steps": 6, "checkpoint_every_steps": 2, "batch_size": 3, "evaluation": {
            "dataset": {"path": "held out"}, "every_steps": 3,
        },
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
    }  # fmt: skip
    whole = RunPaths(shutil.copytree(paths.root, paths.root.with_name(f"{paths.root.name}-whole")))
    finished = train(ranks, whole, sft)
    assert finished.codes == [0], finished.log
    stop_in_step(ranks, paths, 5, sft)
    assert train(ranks, paths, sft).codes == [0]
    rows, expected = (read_readable_records(run.sft_metrics) for run in (paths, whole))
    assert [row["step"] for row in expected if "eval/loss" in row] == [3, 6]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    files = [run.sft_export / "model.safetensors" for run in (paths, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    held_out = [
        parse_demonstration({"prompt": [{"role": "user", "content": question}],
                             "completion": [{"role": "assistant", "content": answer}]})
        for question, answer in ANSWERS.items()
    ]  # fmt: skip
    judged = DemonstrationTokenizer(whole.sft_export).build_rows(held_out)
    with torch.no_grad():
        loss = compute_cross_entropy(load_float64_model(whole.sft_export), judged)
    assert expected[-1]["eval/loss"] == pytest.approx(loss.item(), rel=1e-5)
