"""A teacher that a real SGLang holds: it says what a network of the trainer does, or is refused."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError, UntrainableBatchError
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.sections.trainer import ObjectiveConfig, TeacherConfig, TrainerConfig
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.trainer.batch.packing import TEMPERATURE_CHANNEL, TrainingRow
from areal_hpc.trainer.batch.training_rows import build_rows_to_score, read_rows_by_ticket
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.scoring.frozen_models import FrozenModels
from areal_hpc.trainer.scoring.served_teacher import TeacherClient
from tests.support.rank_server import RankServer
from tests.support.recorded_run import TRAINER, VOCAB, record_run
from tests.support.sglang_server import serving
from tests.support.small_policy import make_training_row


def make_model(folder: Path, text: str, seed: int) -> Path:
    """A network of another size than the policy's, whose tokens come from a text."""
    make_tiny_model(
        folder, [text], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, layers=4,
        vocab=VOCAB, seed=seed,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another network of the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher") / "model", "one two three", seed=7)


@pytest.fixture(scope="module")
def sglang_url(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(teacher, tmp_path_factory.mktemp("sglang") / "log", context_tokens=128) as url:
        yield url


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("stale"), 2, oldest=1).root


def list_rows(paths: RunPaths, step: int = 1) -> list[TrainingRow]:
    shards = CheckedShards(paths.shards_dir, paths.shard_index_dir)
    tickets = read_rows_by_ticket(read_manifest(paths, step), shards)
    return build_rows_to_score([row for rows in tickets for row in rows], ObjectiveConfig())


def ask(config: TeacherConfig, call: Callable[[TeacherClient], Awaitable[object]]) -> None:
    """Call a teacher's client, in an event loop of its own."""

    async def run() -> None:
        async with aclosing(TeacherClient(config)) as client:
            await call(client)

    asyncio.run(run())


def measure_gaps(scenario: dict[str, Any], paths: RunPaths) -> dict[str, Any]:
    """The largest differences between what a server and a network of the trainer say, by batch."""
    configs = [
        TrainerConfig.model_validate(
            {**TRAINER, **scenario["trainer"], "objective": {"teacher": where}}
        )
        for where in scenario["teachers"]
    ]
    model, device = paths.starting_model_dir, torch.device("cpu")
    found = [FrozenModels(config, model, device, lambda: False) for config in configs]
    policy = build_policy(read_architecture(model), configs[0].parallel, torch.float32, device)
    gaps = []
    for step in (1, 2):
        rows = list_rows(paths, step)
        served, own = (one.score(policy, step, rows).teacher or [] for one in found)
        trained = sum(np.count_nonzero(row.loss_mask_T[1:]) for row in rows)
        assert sum(np.count_nonzero(one) for one in served) == trained > 0
        gaps.append(float(np.abs(np.concatenate(served) - np.concatenate(own)).max()))
    for one in found:
        one.close()
    return {"gaps": gaps}


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_says_what_the_network_does_token_by_token(
    ranks: RankServer, stale: Path, teacher: Path, sglang_url: str, tmp_path: Path, count: int
) -> None:
    paths = RunPaths(shutil.copytree(stale, tmp_path / "run"))
    teachers = [{"coef": 1.0, "url": sglang_url}, {"coef": 1.0, "path": str(teacher)}]
    outcome = ranks.call(
        measure_gaps, paths, count, trainer={"parallel": {"dp": count}}, teachers=teachers
    )
    assert outcome.codes == [0] * count, outcome.log
    for report in outcome.reports:
        assert max(report["gaps"]) <= 1e-4


def test_another_tokenizer_is_refused(
    ranks: RankServer, stale: Path, sglang_url: str, tmp_path: Path
) -> None:
    paths = RunPaths(shutil.copytree(stale, tmp_path / "run"))
    other = make_model(tmp_path / "other", "four five six seven" * 9, seed=1)
    shutil.copy(other / "tokenizer.json", paths.starting_model_dir)
    settings = {"total_steps": 1, "objective": {"teacher": {"coef": 1.0, "url": sglang_url}}}
    outcome = ranks.run(paths, "replay", 2, trainer={**settings, "parallel": {"dp": 2}})
    assert RecipeError.exit_code in outcome.codes
    assert "for the policy" in outcome.reports[0]["error"]
    assert not paths.metrics.exists()


def test_a_smaller_vocabulary_is_refused(stale: Path, sglang_url: str, tmp_path: Path) -> None:
    """SGLang itself would end at a token that it does not have."""
    model = shutil.copytree(RunPaths(stale).starting_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 10 * VOCAB}))
    config = TeacherConfig(url=sglang_url, coef=1.0)
    with pytest.raises(RecipeError, match=r"answered 400.*out-of-vocabulary"):
        ask(config, lambda client: client.check_tokenizer(model))
    ask(config, lambda client: client.check_tokenizer(RunPaths(stale).starting_model_dir))


@pytest.mark.parametrize(
    ("ids", "channels", "said"),
    [
        ([5, 6, 7], {TEMPERATURE_CHANNEL: 0.7}, "a row sampled with temperature 0.7"),
        ([5] * 400, {}, "answered 400"),
    ],
    ids=["temperature", "too long"],
)
def test_rows_that_it_cannot_score_are_refused(
    sglang_url: str, ids: list[int], channels: dict[str, float], said: str
) -> None:
    config = TeacherConfig(url=sglang_url, coef=1.0)
    row = make_training_row(ids, 1, channels)
    with pytest.raises(UntrainableBatchError, match=f"batch 7: .*{said}") as caught:
        ask(config, lambda client: client.score(7, [row]))
    assert "areal-hpc quarantine sets this batch aside" in caught.value.problems[0].hint
