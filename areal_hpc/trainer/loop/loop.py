"""The loop that every trainer rank runs: rank 0 decides, all ranks act."""

from __future__ import annotations

import time

import msgspec

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.errors import ArealError, ShardError
from areal_hpc.trainer.collectives import OtherRankFailed, any_rank, from_rank_zero
from areal_hpc.trainer.fence import SupersededError
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.commands import Command, Commit, Export, Publish, Stop, Train
from areal_hpc.trainer.loop.coordinator import Conductor
from areal_hpc.trainer.loop.replay_source import Replay
from areal_hpc.trainer.model.hf_weights import export_hf
from areal_hpc.trainer.untrained import GradientError

Decider = Conductor | Replay
"""Who decides on rank 0: for a run with its servers, or from the manifests of a recorded one."""


def run_loop(learner: Learner, conductor: Decider | None, stop: StopRequest) -> bool:
    """Train until rank 0 says stop; true when the run is complete.

    Args:
        learner: This rank's part.
        conductor: Rank 0's; None on the other ranks.
        stop: A stop asked of any rank is a stop of all.

    Raises:
        ArealError: The conductor cannot go on, or a batch cannot be trained on. A commit in the
            writing has been finished first: what was trained is worth keeping.
    """
    while True:
        if any_rank(stop.requested):
            stop.request()
        _follow_commit(learner, conductor, wait=False)
        command, trouble = _agree(conductor)
        if isinstance(command, Stop):
            _follow_commit(learner, conductor, wait=True)
            if trouble is not None:
                raise trouble
            return command.finished
        _act(command, learner, conductor)


def _follow_commit(learner: Learner, conductor: Decider | None, *, wait: bool) -> None:
    """Look after the commit in the writing, and tell rank 0's conductor when it is durable."""
    began = time.perf_counter()
    is_durable = learner.finish_commit() if wait else learner.poll_commit()
    if is_durable and conductor:
        conductor.committed(time.perf_counter() - began)


def _agree(conductor: Decider | None) -> tuple[Command, ArealError | None]:
    """Rank 0's next command, on every rank; on rank 0 also why it can think of none but a stop."""
    message, trouble = None, None
    if conductor:
        try:
            message = msgspec.json.encode(conductor.next())
        except SupersededError:
            raise  # a successor may already have taken over: nothing is ours to finish
        except ArealError as error:
            message, trouble = msgspec.json.encode(Stop(finished=False)), error
    command: Command = msgspec.json.decode(from_rank_zero(message), type=Command)
    return command, trouble


def _act(command: Command, learner: Learner, conductor: Decider | None) -> None:
    match command:
        case Train(manifest):
            try:
                report = learner.train(manifest)
            except (GradientError, ShardError, OtherRankFailed):  # on all ranks alike
                _follow_commit(learner, conductor, wait=True)
                raise
            if conductor:
                conductor.trained(learner.version, report)
        case Publish():
            parameters = export_hf(learner.policy)
            if isinstance(conductor, Conductor):
                conductor.publish(parameters)
            for _ in parameters:  # exporting is a collective: the others drain it
                pass
        case Commit(line):
            _follow_commit(learner, conductor, wait=True)  # an earlier one
            began = time.perf_counter()
            learner.begin_commit(line)
            if conductor:
                conductor.commit_begun(time.perf_counter() - began)
        case Export():
            learner.export()
            if isinstance(conductor, Conductor):
                conductor.exported()
