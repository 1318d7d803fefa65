"""A teacher behind a real SGLang scores as a network does, and each of its failures is reported."""

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError, RecipeError, TeacherError, UntrainableBatchError
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.sections.objective import ObjectiveConfig, TeacherConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.batch.training_rows import build_rows_to_score, read_rows_by_ticket
from areal_hpc.trainer.collectives import RankProgress, gather_objects_on_first_rank
from areal_hpc.trainer.job import make_replay_coordinator
from areal_hpc.trainer.loop import run_loop
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.private_apis.torch_private import get_default_store
from areal_hpc.trainer.served_teacher import TeacherClient
from areal_hpc.trainer.side_networks import FrozenModels
from tests.support.deadlines import scaled
from tests.support.json_server import JsonHandler, serving_http
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, TICKETS, TRAINER, VOCAB, record_run
from tests.support.replay_worker import Scenario, make_learner
from tests.support.sglang_server import serving
from tests.support.small_policy import make_training_row


def make_model(folder: Path, text: str, seed: int) -> Path:
    """Make a network of another size than the policy's, with a tokenizer trained on a text."""
    make_tiny_model(
        folder, [text], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, layers=4,
        vocab=VOCAB, seed=seed,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    async def run() -> None:
        async with aclosing(TeacherClient(config)) as client:
            await call(client)

    asyncio.run(run())


def measure_gaps(scenario: dict[str, Any], paths: RunPaths) -> dict[str, Any]:
    """Measure the largest differences between a server and a network of the trainer, by batch."""
    configs = [
        TrainerConfig.model_validate(
            {**TRAINER, **scenario["trainer"], "objective": {"teacher": where}}
        )
        for where in scenario["teachers"]
    ]
    model, device = paths.starting_model_dir, torch.device("cpu")
    teachers = [FrozenModels(config, model, device, lambda: False) for config in configs]
    policy = build_policy(read_architecture(model), configs[0].parallel, torch.float32, device)
    gaps = []
    for step in (1, 2):
        rows = list_rows(paths, step)
        served, own = (teacher.score(policy, step, rows).teacher or [] for teacher in teachers)
        trained = sum(np.count_nonzero(row.loss_mask_T[1:]) for row in rows)
        assert sum(np.count_nonzero(scores) for scores in served) == trained > 0
        gaps.append(float(np.abs(np.concatenate(served) - np.concatenate(own)).max()))
    for teacher in teachers:
        teacher.close()
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
    ("ids", "channels", "message"),
    [
        ([5, 6, 7], {Channel.TEMPERATURE: 0.7}, "a row sampled with temperature 0.7"),
        ([5] * 400, {}, "answered 400"),
    ],
    ids=["temperature", "too long"],
)
def test_rows_that_it_cannot_score_are_refused(
    sglang_url: str, ids: list[int], channels: dict[str, float], message: str
) -> None:
    config = TeacherConfig(url=sglang_url, coef=1.0)
    row = make_training_row(ids, 1, channels)
    with pytest.raises(UntrainableBatchError, match=f"batch 7: .*{message}") as caught:
        ask(config, lambda client: client.score(7, [row]))
    assert "areal-hpc quarantine sets this batch aside" in caught.value.problems[0].hint


LOGPROB = -1.5
ROWS_PER_BATCH = TICKETS * SAMPLES
Answer = int | str | list[Any]
"""A status, a fault in place of an answer, or a token's log-probability in a list."""


class ScriptedTeacher:
    """Server that answers rows as SGLang does, or as `choose` says for the call's number, from 0.

    With a model it knows the texts of its tokens, too: such calls are not counted.
    """

    def __init__(
        self, choose: Callable[[int], Answer], model: Path | None = None, key: str = ""
    ) -> None:
        self.key = key
        self._choose, self._lock, self.calls = choose, threading.Lock(), 0
        self.encoder = TokenEncoder.from_model_dir(model) if model else None
        self.is_over = threading.Event()

    def choose_next(self) -> Answer:
        with self._lock:
            self.calls += 1
            return self._choose(self.calls - 1)


class _TeacherHandler(JsonHandler):
    teacher: ScriptedTeacher

    def post(self, content: bytes) -> None:
        body, teacher = json.loads(content), self.teacher
        ids, start = body["input_ids"], body["logprob_start_len"]
        encoder = teacher.encoder
        if body.get("return_text_in_logprobs") and encoder:
            self.answer(200, _build_reply([[LOGPROB, id_, encoder.decode([id_])] for id_ in ids]))
            return
        if teacher.key and self.headers["Authorization"] != f"Bearer {teacher.key}":
            self.answer(401, b"no such key")
            return
        match teacher.choose_next():
            case int(200):
                self.answer(200, _build_reply([[LOGPROB, token, None] for token in ids[start:]]))
            case [logprob]:
                self.answer(200, _build_reply([[logprob, token, None] for token in ids[start:]]))
            case int(status):
                self.answer(status, b"the server says so")
            case "hang up":
                pass
            case "hang up late":
                teacher.is_over.wait(1.2)
            case "drip":
                self._begin(200, 1000)
                while not teacher.is_over.wait(0.05):
                    self.wfile.write(b" ")
            case "garble":
                self._begin(200, 4, {"Content-Encoding": "gzip"})
                self.wfile.write(b"none")
            case other:
                raise AssertionError(other)

    def _begin(self, status: int, size: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(size), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _build_reply(entries: list[list[Any]]) -> dict[str, Any]:
    entries[0][0] = None
    return {"text": "", "meta_info": {"input_token_logprobs": entries}}


@contextmanager
def scripted(
    choose: Callable[[int], Answer], model: Path | None = None, key: str = ""
) -> Iterator[str]:
    scripted_teacher = ScriptedTeacher(choose, model, key)

    class Handler(_TeacherHandler):
        teacher = scripted_teacher

    with serving_http(Handler) as url:
        try:
            yield url
        finally:
            scripted_teacher.is_over.set()


def score(
    url: str, rows: int = 1, api_key_file: Path | None = None, **settings: Any
) -> list[npt.NDArray[np.float32]]:
    config = TeacherConfig(url=url, coef=1.0, api_key_file=api_key_file)

    async def run() -> list[npt.NDArray[np.float32]]:
        async with aclosing(TeacherClient(config, **settings)) as client:
            return await client.score(3, [make_training_row([5, 6, 7, 8], 2, {})] * rows)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("faults", "retry_s"),
    [
        ([500, 429, 599, "hang up", "garble"], 300.0),
        (["hang up late"], 1.0),  # the time to repeat counts from there
    ],
)
def test_whatever_a_server_fails_with_is_repeated(faults: list[Answer], retry_s: float) -> None:
    with scripted(lambda call: faults[call] if call < len(faults) else 200) as url:
        scores = score(url, rows=len(faults), retry_s=retry_s)
    assert [score_T.tolist() for score_T in scores] == [[0.0, 0.0, LOGPROB, LOGPROB]] * len(faults)


@pytest.mark.parametrize(
    ("answer", "message"), [(500, "answered 500: the server says so"), ("drip", "TimeoutError")]
)
def test_what_never_ends_is_given_up(answer: Answer, message: str) -> None:
    timeout_s = 0.3 if isinstance(answer, str) else 60.0  # otherwise no test of its speed
    with scripted(lambda call: answer) as url, pytest.raises(ClusterError, match=message):
        score(url, call_timeout_s=timeout_s, retry_s=0.0)


@pytest.mark.parametrize("logprob", [None, 2.0, -1e39])
def test_what_is_no_log_probability_is_refused(logprob: float | None) -> None:
    with scripted(lambda call: [logprob]) as url, pytest.raises(ClusterError) as caught:
        score(url)
    assert f"gave {logprob} for the log-probability of token 2 of 4" in str(caught.value)


@pytest.mark.parametrize("answer", [401, 404])
def test_what_concerns_all_batches_sets_none_aside(answer: int) -> None:
    with scripted(lambda call: answer) as url, pytest.raises(TeacherError) as caught:
        score(url)
    assert "quarantine" not in str(caught.value)


def test_its_key_is_shown_and_a_wrong_one_is_told_apart(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    with scripted(lambda call: 200, key="a key of the server's") as url:
        key_file.write_text("a key of the server's\n")
        score(url, api_key_file=key_file)
        key_file.write_text("another")
        with pytest.raises(TeacherError, match="401: no such key") as caught:
            score(url, api_key_file=key_file)
        assert caught.value.problems[0].key == "trainer.objective.teacher.api_key_file"
        key_file.chmod(0o644)
        with pytest.raises(RecipeError, match="others may read it"):
            score(url, api_key_file=key_file)


def build_settings(url: str) -> dict[str, Any]:
    objective = {"teacher": {"coef": 1.0, "url": url}}
    return {"total_steps": 3, "objective": objective, "parallel": {"dp": 2}}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "UntrainableBatchError"), (403, "TeacherError")]
)
def test_a_refusal_waits_for_the_checkpoint_that_is_being_written(
    ranks: RankServer, paths: RunPaths, tmp_path: Path, status: int, kind: str
) -> None:
    gate = tmp_path / "gate"
    gate.touch()

    def choose(call: int) -> Answer:
        if call < ROWS_PER_BATCH:
            return 200
        if call == ROWS_PER_BATCH:
            threading.Timer(1.0, gate.unlink).start()  # after the refusal
        return status

    with scripted(choose, paths.starting_model_dir) as url:
        outcome = ranks.run(
            paths, "replay", 2, trainer={**build_settings(url), "checkpoint_every_steps": 1},
            faults=f"checkpoint.before_rename=hold:{gate}",
        )  # fmt: skip
    assert outcome.codes[0] == 78, outcome.log
    assert outcome.reports[0]["kind"] == kind
    assert [checkpoint.state.step for checkpoint in list_checkpoints(paths.checkpoints_dir)] == [1]


def train_until_stopped(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    stop = StopRequest.install()
    pids = gather_objects_on_first_rank(os.getpid(), int)
    lines = []

    def on_hang(line: str) -> None:
        # A look may come before the first call was answered: then the line does not say why.
        if "scores of batch 2" in line and "answered 503" in line:
            lines.append(line)
            if len(lines) == 1:
                os.kill(pids[1], signal.SIGTERM)

    world = (get_default_store(), dist.get_rank(), dist.get_world_size())
    with RankProgress(*world, on_hang, hang_s=scaled(1.0), check_interval_s=0.1).watch():
        learner = make_learner(scenario, paths, stop=stop)
        coordinator = None
        if dist.get_rank() == 0:
            coordinator = make_replay_coordinator(
                learner, paths, learner._config, 1, learner._config.total_steps, stop
            )
        finished = run_loop(learner, coordinator, stop)
        learner.close()
    return {"finished": finished, "lines": lines}


def test_a_stop_is_heard_while_the_server_is_busy_and_what_was_trained_is_saved(
    ranks: RankServer, paths: RunPaths
) -> None:
    with scripted(
        lambda call: 200 if call < ROWS_PER_BATCH else 503, paths.starting_model_dir
    ) as url:
        outcome = ranks.call(train_until_stopped, paths, 2, trainer=build_settings(url))
    assert outcome.codes == [0, 0], outcome.log
    assert [report["finished"] for report in outcome.reports] == [False, False]
    position = f"at scores of batch 2 by the teacher at {url}, 0 of 12 rows: answered 503"
    assert any(position in line for line in outcome.reports[0]["lines"])
    (checkpoint,) = list_checkpoints(paths.checkpoints_dir)
    assert (checkpoint.state.step, checkpoint.state.consumed) == (1, [1])
