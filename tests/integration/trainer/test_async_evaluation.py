"""An evaluation cell beside training: what it is given, what the ledger hears, what is written."""

import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC, read_metrics
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.trainer.config import EvaluationSetSchedule, Schedule
from areal_hpc.trainer.loop.live_run import AsyncEvaluationTracker
from areal_hpc.trainer.loop.loop import Action, Coordinator
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.ledger import EvaluateReply, EvaluateRequest
from areal_hpc.wire.replicas import ReplicasOfCell
from areal_hpc.wire.weight_version import WeightVersion
from tests.integration.trainer.test_coordinator import (
    Ledger,
    make_coordinator,
    publish,
    start_ledger,
    start_relay,
)
from tests.support.deadlines import Deadline, scaled
from tests.support.waiting import await_endpoint, wait_for

CELL = "control-evaluation"
TASKS = 8
LIMIT_S = 60.0


class Court:
    """A run whose evaluation cell takes as long as the test wants it to."""

    def __init__(self, stack: ExitStack, directory: Path, total_steps: int) -> None:
        self.stack, self.directory = stack, directory
        self.rewards: dict[int, float] = {}
        """Of the evaluations that are over, by step."""
        self.asked: list[tuple[int, str]] = []
        """Each step that the ledger was first asked to evaluate, and what the cell served then."""
        self.step, self._finished = 0, False
        court = self

        class Judge(Ledger):
            def reply(self, body: bytes) -> object:
                if self.path != "/evaluate":
                    return super().reply(body)
                step = msgspec.json.decode(body, type=EvaluateRequest).step
                if step not in [known for known, _ in court.asked]:
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
        """The version that the evaluation cell serves."""
        endpoint = rendezvous.find_endpoint(self.directory, CELL)
        assert endpoint is not None
        with closing(WireClient(endpoint.url, timeout_s=scaled(5.0))) as client:
            return client.call("/replicas", None, ReplicasOfCell).replicas[0].version

    def follow(self, until: Callable[[], bool], *, most_steps: int = 1000) -> None:
        """Do what the coordinator says, but train no step above `most_steps`."""
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
        """The coordinator has said that the run is complete."""
        return self._finished

    def written(self) -> dict[int, float]:
        """Rewards in the metrics, by step."""
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
