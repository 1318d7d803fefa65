"""The first rank's loop serves healthy, failing and vanishing cells, and an evaluation cell."""

import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import IdleError, RecipeError
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.step_metrics import (
    VALIDATION_REWARD_METRIC,
    EpisodeFailureCounter,
    read_metrics,
)
from areal_hpc.metrics.writer import MetricsWriter, StepRecord
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.trainer.config import EvaluationSetSchedule, Schedule
from areal_hpc.trainer.live_run import MAX_REFUSED_PROOFS, AsyncEvaluationTracker, LiveRun
from areal_hpc.trainer.loop import Action, Command, Coordinator
from areal_hpc.view.events import NewEventLineFormatter
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.publisher import Publisher, WeightSenders, make_transport
from areal_hpc.weights.update import Probe
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.ledger import (
    Acknowledged,
    BatchManifest,
    BatchReply,
    BatchRequest,
    EvaluateReply,
    EvaluateRequest,
)
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import Deadline, scaled
from tests.support.environments import CHECKOUT
from tests.support.json_server import JsonHandler, serving_http
from tests.support.service_keys import SERVICE_KEY
from tests.support.waiting import await_endpoint, wait_for
from tests.support.weight_updates import WITHOUT_MODEL

SPECS = [TensorSpec("model.norm.weight", (16,), "float32")]
HANG_S = 1.0
"""Cost of each try of the failing replica."""


class Ledger(JsonHandler):
    """Ledger that has every batch at once."""

    def post(self, content: bytes) -> None:
        self.answer(200, self.reply(content))

    def reply(self, body: bytes) -> object:
        if self.path == "/batch":
            request = msgspec.json.decode(body, type=BatchRequest)
            return BatchReply(BatchManifest(request.step, request.generation, []))
        return Acknowledged()


class CellThatStarts(Ledger):
    """Control proxy of a cell whose replica is not ready yet."""

    def get(self) -> None:
        self.answer(200, ReplicasOfCell("cell-0", [ReplicaView(0, 1, "starting", "")]))


def start_ledger(
    stack: ExitStack, directory: Path, handler: type[Ledger] = Ledger, service: str = "ledger"
) -> None:
    url = stack.enter_context(serving_http(handler))
    rendezvous.publish_endpoint(directory, service, url)


def start_relay(
    stack: ExitStack, directory: Path, cell: str, hang_s: float = 0.0
) -> subprocess.Popen[bytes]:
    module = "tests.integration.trainer.scripted_relay"
    command = [sys.executable, "-m", module, cell, str(directory), str(hang_s)]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def make_coordinator(
    stack: ExitStack,
    directory: Path,
    cells: int,
    schedule: Schedule = Schedule(1000, 1000, 0),  # noqa: B008
    evaluation: AsyncEvaluationTracker | None = None,
    idle_timeout_s: float = math.inf,
) -> Coordinator:
    weights = WeightsConfig(update_timeout_s=scaled(10))
    transport = make_transport(
        weights, SERVICE_KEY, "gloo", torch.device("cpu"), directory / "weights"
    )
    publisher = Publisher(
        transport, directory, cells, SERVICE_KEY, evaluation_cell=evaluation is not None
    )
    metrics = MetricsWriter(directory / "metrics.jsonl", None, 0)
    record, stop = StepRecord(metrics, WeightVersion(1, 0), {}), StopRequest()
    live_run = LiveRun(
        schedule,
        record,
        ledger=ServiceClient(directory, rendezvous.LEDGER_SERVICE, SERVICE_KEY),
        publisher=publisher,
        senders=WeightSenders(0, 1, SPECS, transport, lambda *args: []),
        events=EventLog(directory / "events.jsonl", "trainer"),
        stop=stop,
        episode_failures=EpisodeFailureCounter(directory / "events.jsonl"),
        idle_timeout_s=idle_timeout_s,
        async_evaluation=evaluation,
    )
    coordinator = Coordinator(schedule, record, live_run.poll_next_batch, stop, live_run)
    stack.callback(coordinator.close)
    return coordinator


def publish(coordinator: Coordinator, command: Command, probe: Probe = WITHOUT_MODEL) -> None:
    assert coordinator.live_run is not None
    weights = iter([(SPECS[0].name, torch.ones(16))])
    coordinator.live_run.publish_weights(command.shares, weights, lambda: probe)


def train(coordinator: Coordinator, steps: int, probe: Probe = WITHOUT_MODEL) -> float:
    began, deadline = time.monotonic(), Deadline(100)
    step = 0
    while step < steps:
        assert not deadline.is_over()
        command = coordinator.choose_next_command()
        if command.action is Action.PUBLISH:
            publish(coordinator, command, probe)
        elif command.manifest is not None:
            step = command.manifest.step
            coordinator.on_trained(WeightVersion(1, step), {})
        else:
            assert command.action is Action.WAIT
    return time.monotonic() - began


def test_an_engine_that_computes_another_model_ends_the_run(
    stack: ExitStack, tmp_path: Path
) -> None:
    start_ledger(stack, tmp_path)
    start_relay(stack, tmp_path, "cell-0")
    await_endpoint(tmp_path, rendezvous.format_control_proxy_name("cell-0"))
    coordinator = make_coordinator(stack, tmp_path, cells=1)
    wrong = replace(WITHOUT_MODEL, logprobs=[logprob - 4.0 for logprob in WITHOUT_MODEL.logprobs])
    with pytest.raises(RecipeError, match=r"another model than the trainer: .* by 4 on average"):
        train(coordinator, 1, wrong)
    refused = [
        event
        for event in read_readable_records(tmp_path / "events.jsonl")
        if event["event"] == "weights_published"
    ]
    assert len(refused) == MAX_REFUSED_PROOFS
    formatter = NewEventLineFormatter()
    lines = [formatter.describe_news(event) for event in refused]
    assert lines[0][0].startswith("weights  no replica has taken weights 1.0")
    assert lines[1:] == [[]] * (MAX_REFUSED_PROOFS - 1), "it is told once"


def test_a_trainer_without_cells_gives_its_nodes_back(stack: ExitStack, tmp_path: Path) -> None:
    start_ledger(stack, tmp_path)
    coordinator = make_coordinator(stack, tmp_path, 1, idle_timeout_s=2.0)
    with pytest.raises(IdleError, match="no cell has been there"):
        train(coordinator, 1)


def test_a_step_that_takes_longer_than_a_cell_may_be_missing_is_no_reason_to_give_nodes_back(
    stack: ExitStack, tmp_path: Path
) -> None:
    start_ledger(stack, tmp_path, CellThatStarts, "control-cell-0")
    coordinator = make_coordinator(stack, tmp_path, 1, idle_timeout_s=scaled(0.5))
    assert coordinator.choose_next_command() == Command(Action.WAIT), (
        "its replica is there, and takes nothing yet"
    )
    time.sleep(scaled(1.0))
    assert coordinator.choose_next_command() == Command(Action.WAIT)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_stop_saves_what_was_trained_unless_that_is_given_up(
    tmp_path: Path, is_given_up: bool
) -> None:
    metrics, stop = MetricsWriter(tmp_path / "metrics.jsonl", None, 0), StopRequest()
    record = StepRecord(metrics, WeightVersion(1, 0), {})
    coordinator = Coordinator(
        Schedule(1, 1000, None),
        record,
        lambda step: None,
        stop,
        must_end_unsaved=lambda: is_given_up,
    )
    coordinator.on_trained(WeightVersion(1, 1), {})
    stop.request()
    command = coordinator.choose_next_command()
    if not is_given_up:
        assert command.action is Action.SAVE
        coordinator.on_checkpoint_started(0.0)
        command = coordinator.choose_next_command()
    assert command == Command(Action.STOP, finished=not is_given_up)


def test_a_replica_that_never_joins_and_a_cell_that_is_silent_do_not_stop_the_training(
    stack: ExitStack, tmp_path: Path
) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    start_ledger(stack, tmp_path)
    start_relay(stack, tmp_path, "cell-0")
    start_relay(stack, tmp_path, "cell-1", HANG_S)
    rendezvous.publish_endpoint(
        tmp_path, "control-cell-2", f"http://127.0.0.1:{silent.getsockname()[1]}"
    )
    for cell in ("cell-0", "cell-1"):
        await_endpoint(tmp_path, f"control-{cell}")
    coordinator = make_coordinator(stack, tmp_path, cells=3)
    took_s = train(coordinator, steps=40)
    updates = [
        event for event in read_readable_records(tmp_path / "events.jsonl") if event["replicas"]
    ]
    tries = [event for event in read_readable_records(tmp_path / "events.jsonl") if event["failed"]]
    assert {event["version"] for event in updates} == {f"1.{step}" for step in range(40)}
    assert tries
    assert 2 ** (len(tries) - 1) - 1 <= took_s, "tried again after ever longer pauses"
    assert len(tries) < 20, "not with each of 40 updates"
    lines = read_readable_records(tmp_path / "metrics.jsonl")
    phases = ("pause_call", "transfer", "load", "verify", "flush", "resume")
    assert all(f"weights/{phase}_s" in lines[0] for phase in phases)


CELL = "control-evaluation"
TASKS = 8
LIMIT_S = 60.0


class Court:
    """Run whose evaluation cell takes as long as the test wants."""

    def __init__(self, stack: ExitStack, directory: Path, total_steps: int) -> None:
        self.stack, self.directory = stack, directory
        self.rewards: dict[int, float] = {}
        """Rewards of the finished evaluations, by step."""
        self.asked: list[tuple[int, str]] = []
        """Steps of the first evaluation requests, with the version that the cell served then."""
        self.step, self._finished = 0, False
        court = self

        class Judge(Ledger):
            def reply(self, body: bytes) -> object:
                if self.path != "/evaluate":
                    return super().reply(body)
                step = msgspec.json.decode(body, type=EvaluateRequest).step
                if step not in [asked_step for asked_step, _ in court.asked]:
                    court.asked.append((step, court.served()))
                reward = court.rewards.get(step)
                row = None if reward is None else {VALIDATION_REWARD_METRIC: reward}
                return EvaluateReply(0, TASKS, row)

        start_ledger(stack, directory, Judge)
        start_relay(stack, directory, "cell-0")
        self.evaluation_cell = self.start_evaluation_cell()
        await_endpoint(directory, "control-cell-0")
        schedule = Schedule(total_steps, 1000, 0, {"valid": EvaluationSetSchedule(2, TASKS)})
        evaluation = AsyncEvaluationTracker(schedule, -1)
        self.coordinator: Coordinator = make_coordinator(stack, directory, 1, schedule, evaluation)

    def start_evaluation_cell(self) -> subprocess.Popen[bytes]:
        before = rendezvous.find_endpoint(self.directory, CELL)
        process = start_relay(self.stack, self.directory, "evaluation")
        wait_for(lambda: rendezvous.find_endpoint(self.directory, CELL) != before, LIMIT_S)
        return process

    def served(self) -> str:
        endpoint = rendezvous.find_endpoint(self.directory, CELL)
        assert endpoint is not None
        with closing(WireClient(endpoint.url, timeout_s=scaled(5.0))) as client:
            return client.call("/replicas", None, ReplicasOfCell).replicas[0].version

    def follow(self, until: Callable[[], bool], *, most_steps: int = 1000) -> None:
        """Follow the coordinator, but train no step above `most_steps`."""
        deadline = Deadline(LIMIT_S)
        while not until():
            assert not deadline.is_over()
            command = self.coordinator.choose_next_command()
            match command.action:
                case Action.PUBLISH:
                    publish(self.coordinator, command)
                case Action.TRAIN:
                    assert command.manifest is not None
                    if command.manifest.step <= most_steps:
                        self.step = command.manifest.step
                        self.coordinator.on_trained(WeightVersion(1, self.step), {})
                case Action.SAVE:
                    self.coordinator.on_checkpoint_started(0.0)
                    self.coordinator.on_checkpoint_saved(0.0)
                case Action.EXPORT:
                    self.coordinator.on_exported(0.0)
                case Action.STOP:
                    self._finished = command.finished
                    return

    def is_finished(self) -> bool:
        return self._finished

    def written(self) -> dict[int, float]:
        lines = read_metrics(self.directory / "metrics.jsonl")
        return {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}


def test_training_goes_on_and_the_last_step_is_judged(stack: ExitStack, tmp_path: Path) -> None:
    court = Court(stack, tmp_path, total_steps=6)
    court.follow(lambda: court.step == 5, most_steps=5)
    assert court.served() == "1.0"
    assert [step for step, _ in court.asked] == [0]
    court.rewards[0] = 0.25
    court.follow(lambda: len(court.asked) == 2, most_steps=5)
    assert court.asked[1] == (5, "1.5"), "steps 2 and 4 are left out, no episode is granted early"
    court.follow(lambda: court.step == 6)
    court.follow(lambda: len(read_metrics(tmp_path / "metrics.jsonl")) == 7)
    assert court.served() == "1.5"
    court.rewards[5] = 0.5
    court.follow(lambda: len(court.asked) == 3)
    assert court.asked[2] == (6, "1.6")
    assert not court.is_finished()
    court.rewards[6] = 0.75
    court.follow(lambda: court.is_finished())
    assert court.is_finished()
    assert court.written() == {0: 0.25, 5: 0.5, 6: 0.75}
    begun = [
        e
        for e in read_readable_records(tmp_path / "events.jsonl")
        if e["event"] != "weights_published"
    ]
    assert [(event["version"], event["left_out"]) for event in begun] == [
        ("1.0", []),
        ("1.5", [2, 4]),
        ("1.6", []),
    ]


@pytest.mark.thorough
def test_lost_weights_give_way_to_the_present_ones(stack: ExitStack, tmp_path: Path) -> None:
    court = Court(stack, tmp_path, total_steps=1000)
    court.follow(lambda: court.step == 3, most_steps=3)
    assert [step for step, _ in court.asked] == [0]
    court.evaluation_cell.kill()
    court.evaluation_cell.wait()
    court.follow(lambda: court.step == 40, most_steps=40)
    assert [step for step, _ in court.asked] == [0], "a cell that is away holds up nothing"
    court.start_evaluation_cell()
    court.follow(lambda: len(court.asked) == 2, most_steps=40)
    assert court.asked[1] == (40, ""), "before it can play anything on these weights"
    court.follow(lambda: court.served() == "1.40", most_steps=40)
    court.rewards |= {0: 0.25, 40: 0.5}
    court.follow(lambda: court.step == 42)
    court.follow(lambda: len(court.asked) == 3)
    assert court.written() == {40: 0.5}
    (given_up,) = [e for e in read_readable_records(tmp_path / "events.jsonl") if e.get("given_up")]
    assert given_up["given_up"] == "1.0"
    assert given_up["left_out"] == list(range(0, 40, 2))
