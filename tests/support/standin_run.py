"""`areal-hpc` whose runs have stand-ins for SGLang and for the trainer; all else of them is real.

`python -m tests.support.standin_run run RECIPE ...` starts real jobs by the real launcher: ledger,
proxy, driver and the user's agent. The model says what `tests.support.scripted_sglang` says, and
the trainer takes batches without training on them.
"""

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from areal_hpc.cli.main import main
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.launch import prepared_run
from areal_hpc.launch.plan import JobStage, PlanInputs, plan_run
from areal_hpc.launch.tiny_model import TinySizes, build_tiny_architecture_config
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.generations import claim_next_number
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE, ensure_service_key
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.trainer.loop.live_run import raise_if_agents_in_trouble
from areal_hpc.wire.ledger import (
    Acknowledged,
    BatchReply,
    BatchRequest,
    FinishRunRequest,
    OpenTrainerGenerationRequest,
    WeightsPublishedRequest,
)
from areal_hpc.wire.retry import retry
from tests.support.chatml import write_model_dir
from tests.support.scripted_sglang import CELL, Script, ScriptedSGLang, StandInRelay

ReplyT = TypeVar("ReplyT")

SERVER_START_VARIABLE = "STANDIN_SERVER_START_S"
"""How long the stand-in of SGLang takes to serve."""
REPLY_VARIABLE = "STANDIN_REPLY_S"
"""How long a reply takes."""
_ENTRIES = {"inference": f"{__name__}:serve_script", "trainer": f"{__name__}:take_batches"}
if __name__ == "__main__":
    _ENTRIES = {name: entry.replace("__main__", "tests.support.standin_run")
                for name, entry in _ENTRIES.items()}  # fmt: skip


def write_served_model(folder: Path) -> Path:
    """A model folder that passes for one as long as nobody loads the weights."""
    write_model_dir(folder)
    shape = TinySizes(vocab=384)
    (folder / "config.json").write_text(json.dumps(build_tiny_architecture_config(shape)))
    (folder / "model.safetensors").touch()
    return folder


def serve_script(config: dict[str, Any]) -> None:
    """The stand-in of a cell's inference process: a control proxy and one scripted server."""
    asyncio.run(_serve_script(RunPaths(Path(config["run_dir"])), Path(config["model_path"])))


async def _serve_script(paths: RunPaths, model: Path) -> None:
    stop, events = StopRequest.install(), EventLog(paths.events, CELL)
    delay_s = float(os.environ.get(REPLY_VARIABLE, "0"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sglang = ScriptedSGLang(tokenizer, lambda request: Script("1 2", delay_s=delay_s))
    relay = StandInRelay(paths.rendezvous_dir, ensure_service_key(paths.service_key))
    events.record("replica_started", replica=0, incarnation=1, log="")
    await asyncio.gather(sglang.start(), relay.start())
    await asyncio.sleep(float(os.environ.get(SERVER_START_VARIABLE, "0")))
    events.record("replica_ready", replica=0, incarnation=1, seconds=0.0)
    relay.show(sglang.url)
    while not stop.requested:
        await asyncio.sleep(0.05)


def take_batches(config: dict[str, Any]) -> None:
    """The stand-in of the trainer: each batch is a step at once."""
    paths, stop = RunPaths(Path(config["run_dir"])), StopRequest.install()
    events, steps = EventLog(paths.events, "trainer"), config["trainer"]["total_steps"]
    generation = claim_next_number(paths.generations_dir)
    key = ensure_service_key(paths.service_key)
    ledger = ServiceClient(paths.rendezvous_dir, LEDGER_SERVICE, key)

    def tell(route: str, request: msgspec.Struct, reply: type[ReplyT]) -> ReplyT:
        return retry(
            lambda: ledger.call(route, request, reply, timeout_s=16.0),
            120.0,
            is_stopping=lambda: stop.requested,
        )

    tell("/open_generation", OpenTrainerGenerationRequest(generation, 0, -1), Acknowledged)
    for event in ("ranks_joined", "state_loaded"):
        events.record(event, generation=generation)
    events.record("weights_published", version=f"{generation}.0", replicas=1, failed=[])
    tell("/publish", WeightsPublishedRequest(generation, 0), Acknowledged)
    step, began_at = 1, time.monotonic()
    while step <= steps and not stop.requested:
        batch = tell("/batch", BatchRequest(generation, step, 1.0), BatchReply)
        raise_if_agents_in_trouble(batch.trouble)
        manifest = batch.manifest
        if manifest is None:
            continue
        rewards = [reward for ticket in manifest.tickets for reward in ticket.rewards]
        row = {"step": step, "reward/mean": sum(rewards) / len(rewards), "tokens/trained": 100}
        row |= {"time/step_s": time.monotonic() - began_at, "time/batch_wait_s": 0.0}
        append_line(paths.metrics, {**row, "episodes": len(rewards), "tokens/sampled": 50})
        tell("/publish", WeightsPublishedRequest(generation, step), Acknowledged)
        step, began_at = step + 1, time.monotonic()
    if step > steps:
        paths.finished_marker.touch()
        tell("/finish", FinishRunRequest(generation), Acknowledged)


def plan_with_standins(
    recipe: Recipe, paths: RunPaths, facts: PlanInputs | None = None
) -> tuple[JobStage, ...]:
    """The plan of a run, with other entries for two of its processes."""

    def stand_in(spec: ProcessSpec) -> ProcessSpec:
        entry = _ENTRIES.get(spec.name, spec.entry)
        return msgspec.structs.replace(spec, entry=entry)

    def stand_in_job(job: JobSpec) -> JobSpec:
        return msgspec.structs.replace(job, processes=[stand_in(one) for one in job.processes])

    return tuple(
        replace(
            stage,
            leader=stand_in_job(stage.leader),
            others=tuple(stand_in_job(job) for job in stage.others),
        )
        for stage in plan_run(recipe, paths, facts)
    )


if __name__ == "__main__":
    vars(prepared_run)["plan_run"] = plan_with_standins
    main()
