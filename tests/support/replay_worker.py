"""`python -m tests.support.replay_worker SOCKET`: ranks on demand.

Each line of a connection is a scenario, each line of the answer its outcome. The process imports
Megatron once for all who connect and forks the ranks of each scenario, so that a rank costs less
than a second and can be killed at will. What they print goes to the scenario's log. The command
returns when connections are taken; the server ends with the last of them.
"""

import gc
import hashlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import peft  # noqa: F401  (takes seconds: ranks are forked with it)
import torch
import torch.distributed as dist

from areal_hpc.trainer.model.cpu import megatron_cpu  # before anything of Megatron
from tests.support.deadlines import scaled

# isort: split
from areal_hpc.errors import ArealError
from areal_hpc.jobs.node import get_task_position
from areal_hpc.jobs.processes.process_setup import StopRequest, set_up_logging
from areal_hpc.recipe.sections.trainer import ParallelConfig, TrainerConfig
from areal_hpc.rundir.files import build_generation_check, claim_next_number
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.collectives import broadcast_object, report_first_failure
from areal_hpc.trainer.config import SftJobConfig
from areal_hpc.trainer.job import make_replay_coordinator
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop import run_loop
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.process_groups import destroy_process_groups, join_process_groups
from areal_hpc.trainer.sft import SftTrainer
from areal_hpc.wire.fault_points import FAULTS_VARIABLE
from tests.support.recorded_run import TRAINER

Scenario = dict[str, Any]

KILL_GRACE_S = 20.0
"""Grace before others are killed, as by srun --kill-on-bad-exit: they may fail by themselves."""
FIRST_CONNECTION_S = 30.0
POLL_S = 0.5


def digests(policy: TrainedNetwork, optimizer: Any) -> dict[str, str]:
    tensors_held = {name: tensor.detach() for name, tensor in policy.gpt.named_parameters()}
    for part_number, part in enumerate(optimizer.chained_optimizers):
        mains = [main for group in part.optimizer.param_groups for main in group["params"]]
        for number, main in enumerate(mains):
            tensors = {"main": main.detach(), **part.optimizer.state[main]}
            tensors_held |= {f"{part_number}/{number}/{name}": t for name, t in tensors.items()}
    return {
        # As bytes: NumPy has no bfloat16.
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors_held.items()
    }


def config_of(scenario: Scenario) -> TrainerConfig:
    return TrainerConfig.model_validate({**TRAINER, **scenario["trainer"]})


def make_learner(
    scenario: Scenario, paths: RunPaths, keep_best: str = "", stop: StopRequest | None = None
) -> Learner:
    claimed = claim_next_number(paths.generations_dir) if dist.get_rank() == 0 else None
    generation = broadcast_object(claimed, int)
    return Learner(
        config_of(scenario), paths, paths.starting_model_dir, torch.device("cpu"),
        generation=generation, seed=1,
        check_generation=build_generation_check(paths.generations_dir, generation),
        is_stop_requested=lambda: stop is not None and stop.requested,
        keep_best=keep_best,
    )  # fmt: skip


def take_step(learner: Learner, paths: RunPaths, number: int) -> None:
    learner.train_batch(read_manifest(paths, number))


def begin_training(scenario: Scenario, paths: RunPaths, keep_best: str = "") -> Learner:
    """Make a learner with one step taken and saved, and a second step taken."""
    learner = make_learner(scenario, paths, keep_best)
    take_step(learner, paths, 1)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    take_step(learner, paths, 2)
    return learner


def state_of(learner: Learner) -> dict[str, str]:
    state = digests(learner.policy, learner._optimizer)
    if learner._critic is not None:
        held = digests(*learner._critic.state)
        state |= {f"critic.{name}": digest for name, digest in held.items()}
    return state


def moments_of(learner: Learner) -> list[dict[str, Any]]:
    optimizer: Any = learner._optimizer
    parts = optimizer.chained_optimizers
    return [moments for part in parts for moments in part.optimizer.state.values()]


def replay(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    """Train on the recorded batches, from the latest checkpoint to the last step."""
    config, learner = config_of(scenario), make_learner(scenario, paths)
    began_at = learner.state.step
    stop = StopRequest()
    coordinator = None
    if dist.get_rank() == 0:
        learner.checkpoints.delete_leftovers(learner.state.generation)
        coordinator = make_replay_coordinator(learner, paths, config, 1, config.total_steps, stop)
    run_loop(learner, coordinator, stop)
    learner.close()
    return {
        "began_at": began_at,
        "consumed": learner.state.consumed,
        "digests": state_of(learner),
    }


def fine_tune(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    job = SftJobConfig.model_validate(scenario["sft"])
    policy = build_policy(
        read_architecture(job.model_path),
        job.recipe.trainer.parallel,
        torch.float32,
        torch.device("cpu"),
    )
    trainer = SftTrainer(job, paths, policy)
    began_at = trainer.state.step
    trainer.train(StopRequest())
    trainer.checkpoints.close()
    return {"began_at": began_at, "digests": digests(policy, trainer._optimizer)}


def inspect(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    """Call a function of a test module, `module:function`, and return its findings."""
    findings: dict[str, Any] = load_function(scenario["inspect"])(scenario, paths)
    return findings


def load_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def be_rank(scenario: Scenario, rank: int) -> int:
    """Run as one rank of a scenario, in a process of its own; return its exit code."""
    os.environ |= {"AREAL_HPC_RANK": str(rank), "AREAL_HPC_NUM_TASKS": str(scenario["ranks"])}
    paths = RunPaths(Path(scenario["run_dir"]))
    log = os.open(paths.root / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    set_up_logging()
    # Nothing that is trained may depend on any of these.
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    np.random.seed(int.from_bytes(os.urandom(4)))
    random.seed(os.urandom(4))
    if rank == scenario.get("faulty_rank", 0):
        os.environ[FAULTS_VARIABLE] = scenario.get("faults", "")
    report = paths.root / f"report.{rank}.json"
    report.unlink(missing_ok=True)
    try:
        if scenario["act"] == "run":  # the entry of a process, which joins the others itself
            load_function(scenario["entry"])(scenario["config"])
            return 0
        act = {"replay": replay, "fine_tune": fine_tune, "inspect": inspect}[scenario["act"]]
        parallel = ParallelConfig.model_validate(scenario["trainer"].get("parallel", {}))
        join_process_groups(get_task_position(), parallel, "cpu", paths.rendezvous_dir)
        with report_first_failure():
            findings = act(scenario, paths)
        report.write_text(json.dumps(findings))
        destroy_process_groups()
    except ArealError as error:
        traceback.print_exc()
        report.write_text(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return error.exit_code
    except SystemExit as leaving:
        return int(str(leaving.code))
    except AssertionError as error:
        failure = traceback.TracebackException.from_exception(error, capture_locals=True)
        print("".join(failure.format()))
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def launch(scenario: Scenario) -> list[int]:
    if "inspect" in scenario:
        load_function(scenario["inspect"])
    gc.freeze()  # the ranks share the memory of what was imported
    pids = []
    for rank in range(scenario["ranks"]):
        pid = os.fork()
        if pid == 0:
            os._exit(be_rank(scenario, rank))
        pids.append(pid)
    codes: dict[int, int] = {}
    give_up_at = float("inf")
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            give_up_at = min(give_up_at, time.monotonic() + scaled(KILL_GRACE_S))
        if time.monotonic() > give_up_at:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def answer(connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as lines:
        print("ready", file=lines, flush=True)
        for line in lines:
            print(json.dumps(launch(json.loads(line))), file=lines, flush=True)


def serve(listener: socket.socket) -> None:
    """Fork for each connection, until the last has ended."""
    answering: set[int] = set()
    listener.settimeout(scaled(FIRST_CONNECTION_S))
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                answer(connection)
                os._exit(0)
            connection.close()
            answering.add(pid)
        answering = {pid for pid in answering if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if not answering:
            return
        listener.settimeout(POLL_S)


def main(address: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.patch_torch_megatron_without_gpu()
    Path(address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # what was imported is shared with all
        if os.fork() == 0:
            os.setsid()
            serve(listener)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
