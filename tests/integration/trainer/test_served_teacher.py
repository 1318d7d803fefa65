"""A teacher that a real SGLang holds: it says what a network of the trainer does, or is refused."""

import asyncio
import http.server
import json
import shutil
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError, UntrainableBatchError
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.sections.trainer import ObjectiveConfig, TeacherConfig, TrainerConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.digest_checked_reader import CheckedShards
from areal_hpc.trainer.batch.packing import TEMPERATURE_CHANNEL, TrainingRow
from areal_hpc.trainer.batch.training_rows import build_rows_to_score, read_rows_by_ticket
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.scoring.frozen_models import FrozenModels
from areal_hpc.trainer.scoring.served_teacher import MAX_CONCURRENT_CALLS, TeacherClient
from tests.support.deadlines import scaled
from tests.support.rank_server import RankServer
from tests.support.recorded_run import TRAINER, VOCAB, record_run
from tests.support.sglang_server import serving
from tests.support.small_policy import make_training_row

KEY = "a key of the server's"
BUSY_REPLIES = 3


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


class Relay(http.server.ThreadingHTTPServer):
    """Stands before SGLang: asks for a key, is busy at first, and counts the calls under way."""

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _RelayHandler)
        self.upstream, self.busy_left, self.lock = upstream, BUSY_REPLIES, threading.Lock()
        self.under_way = self.most_under_way = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def take_busy_turn(self) -> bool:
        with self.lock:
            self.busy_left -= 1
            return self.busy_left >= 0


class _RelayHandler(http.server.BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._answer(401, b"no such key")
            return
        if self.server.take_busy_turn():
            self._answer(503, b"loading")
            return
        with self.server.lock:
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.upstream + self.path, body, headers)
        with urllib.request.urlopen(request, timeout=scaled(60)) as answer:
            content = answer.read()
        with self.server.lock:
            self.server.under_way -= 1
        self._answer(200, content)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def relay(sglang_url: str) -> Iterator[Relay]:
    with closing(Relay(sglang_url)) as relay:
        yield relay


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(KEY + "\n")
    return path


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
    found = [
        FrozenModels(config, paths, model, device, 0, lambda: None, lambda: False)
        for config in configs
    ]
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


def test_a_run_learns_from_a_server_that_asks_for_a_key_and_is_busy_at_first(
    ranks: RankServer, stale: Path, teacher: Path, relay: Relay, key_file: Path, tmp_path: Path
) -> None:
    lines = {}
    for name, where in (
        ("served", {"url": relay.url, "api_key_file": str(key_file)}),
        ("own", {"path": str(teacher)}),
    ):
        paths = RunPaths(shutil.copytree(stale, tmp_path / name))
        settings = {"total_steps": 2, "objective": {"teacher": {"coef": 0.5, **where}}}
        outcome = ranks.run(paths, "replay", 1, trainer=settings)
        assert outcome.codes == [0], outcome.log
        assert KEY not in outcome.log
        lines[name] = read_readable_records(paths.metrics)
    assert relay.busy_left < 0, "calls were repeated"
    assert relay.most_under_way <= MAX_CONCURRENT_CALLS
    for served, own in zip(lines["served"], lines["own"], strict=True):
        assert served["kl/teacher"] == pytest.approx(own["kl/teacher"], rel=1e-4)
        assert served["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-4)


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
        ask(config, lambda client: client.raise_if_tokenizer_differs(model))
    ask(
        config, lambda client: client.raise_if_tokenizer_differs(RunPaths(stale).starting_model_dir)
    )


def test_a_wrong_key_is_told_apart(relay: Relay, stale: Path, key_file: Path) -> None:
    key_file.write_text("another")
    config = TeacherConfig(url=relay.url, coef=1.0, api_key_file=key_file)
    with pytest.raises(RecipeError, match="401: no such key") as caught:
        ask(
            config,
            lambda client: client.raise_if_tokenizer_differs(RunPaths(stale).starting_model_dir),
        )
    assert caught.value.problems[0].key == "trainer.objective.teacher.api_key_file"
    key_file.chmod(0o644)
    with pytest.raises(RecipeError, match="others may read it"):
        TeacherClient(config)


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
