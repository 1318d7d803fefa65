"""A run of seconds: real services and real training steps, a scripted SGLang, no agent.

Ledger, proxy and inference job are processes as a supervisor starts them, and can be killed one by
one. The test is driver and trainer: it plays tickets, has them sealed, and has a batch trained by
Megatron in a process of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.wire import ledger as ledger_wire
from areal_hpc.wire import proxy as proxy_wire
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.ledger import BatchManifest, TicketRef
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.commands import write_program
from tests.support.deadlines import Deadline, scaled
from tests.support.process_commands import start_job_process
from tests.support.rank_server import RankServer
from tests.support.recorded_run import TRAINER, write_recipe
from tests.support.waiting import wait_for

ReplyT = TypeVar("ReplyT")

CELL = "cell-0"
BATCH_TICKETS, EPISODES = 3, 2
MAX_OFFPOLICYNESS = 1
CELL_TIMEOUT_S = 5.0
PATIENCE_S = 120.0
"""Time limit of any wait, on however busy a machine."""
CALL_TIMEOUT_S = 30.0
SIZES: dict[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 64,
}
ENTRIES = {
    "ledger": "areal_hpc.ledger.job:run",
    "inference": "areal_hpc.inference.job:run",
    "proxy": "areal_hpc.proxy.job:run",
}
ENDPOINTS = {"ledger": "ledger", "inference": f"control-{CELL}", "proxy": f"proxy-{CELL}"}
"""Service -> the name that it publishes its address under."""


class LightRun:
    """The services of one run directory, and a driver's and a trainer's calls to them."""

    def __init__(
        self,
        root: Path,
        scratch: Path,
        ranks: RankServer,
        *,
        total_steps: int,
        proxy: Mapping[str, Any] | None = None,
    ) -> None:
        self.paths = RunPaths(root)
        self.total_steps = total_steps
        self.step = 0
        self.version = WeightVersion(0, 0)
        self._ranks = ranks
        self._scratch = scratch
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._held: list[TicketRef] = []
        self._finished: list[TicketRef] = []
        scratch.mkdir(parents=True)
        make_tiny_model(self.paths.starting_model_dir, ["one two three"], vocab=320, **SIZES)
        schedule = {"total_steps": total_steps, "batch_size": BATCH_TICKETS}
        write_recipe(
            self.paths,
            {**TRAINER, **schedule},
            inference={"max_restarts": 1000, "context_length": 2048},
            proxy=proxy or {},
            shards={"seal_after_s": 3600.0},
            seed=7,
            rollout={"n_samples": EPISODES, "max_head_offpolicyness": MAX_OFFPOLICYNESS},
            valid_dataset={"path": "tasks.jsonl"},
        )
        self.service_key = rendezvous.ensure_service_key(self.paths.service_key)
        tls = make_client_tls(self.service_key)
        self._client = WireClient("", tls=tls, timeout_s=scaled(CALL_TIMEOUT_S))
        self.http = httpx.Client(timeout=scaled(CALL_TIMEOUT_S), trust_env=False, verify=tls)
        for service, config in self._build_configs().items():
            self._config_path(service).write_text(json.dumps(config))
            self.start(service)

    def _build_configs(self) -> dict[str, dict[str, Any]]:
        # Its words are `-m MODULE` and then SGLang's own.
        server = f'shift 2; exec {sys.executable} -m tests.support.scripted_server "$@"'
        model, run_dir = str(self.paths.starting_model_dir), str(self.paths.root)
        return {
            "ledger": {
                "run_dir": run_dir,
                "n_train_tasks": 1000,
                "tasks_by_evaluation_set": {"valid": 5},
                "cell_timeout_s": scaled(CELL_TIMEOUT_S),
            },
            "inference": {
                "run_dir": run_dir,
                "cell": CELL,
                "model_path": model,
                "serve_python": str(write_program(self._scratch / "serve-python", server)),
            },
            "proxy": {
                "run_dir": run_dir,
                "cell": CELL,
                "model_path": model,
            },
        }

    # Services --------------------------------------------------------------------------------

    def start(self, service: str) -> None:
        process = start_job_process(
            ENTRIES[service],
            self._config_path(service),
            self._log_path(service),
            environ={**os.environ, "SLURM_TMPDIR": str(self._scratch)},
        )
        self._processes[service] = process
        self.await_true(lambda: self._is_published(service))

    def _is_published(self, service: str) -> bool:
        assert self._processes[service].poll() is None, self.said()
        try:
            name = ENDPOINTS[service]
            endpoint = rendezvous.find_endpoint(self.paths.rendezvous_dir, name)
        except OSError:  # storage with faults
            return False
        return endpoint is not None and endpoint.pid == self._processes[service].pid

    def pid(self, service: str) -> int:
        return self._processes[service].pid

    def is_alive(self, service: str) -> bool:
        return self._processes[service].poll() is None

    def restart(self, service: str) -> None:
        """Kill a service with kill -9, if it lives, and start another."""
        self._processes[service].kill()
        self._processes[service].wait()
        self.start(service)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(scaled(20.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.http.close()
        self._client.close()

    def key(self, service: str) -> str:
        return derive_bearer_key(self.service_key, ENDPOINTS[service])

    def build_headers(self, service: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key(service)}"}

    def url(self, service: str) -> str:
        name = ENDPOINTS[service]
        endpoint = rendezvous.find_endpoint(self.paths.rendezvous_dir, name)
        assert endpoint is not None
        return endpoint.url

    def _config_path(self, service: str) -> Path:
        return self._scratch / f"{service}.json"

    def _log_path(self, service: str) -> Path:
        return self._scratch / f"{service}.log"

    def said(self) -> str:
        logs = [self._log_path(service) for service in ENTRIES]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def await_true(self, condition: Any) -> None:
        wait_for(condition, PATIENCE_S, self.said, every_s=0.05)

    def call(
        self, service: str, route: str, request: msgspec.Struct | None, reply: type[ReplyT]
    ) -> ReplyT:
        deadline = Deadline(PATIENCE_S)
        while True:
            try:
                url = f"{self.url(service)}{route}"
                return self._client.call(url, request, reply, key=self.key(service))
            except (ClusterError, OSError) as error:
                status = getattr(error, "status", 503)
                if status < 500 or deadline.is_over():
                    raise
                time.sleep(0.1)

    # The driver ------------------------------------------------------------------------------

    def play(self, tickets: int) -> None:
        done, deadline = 0, Deadline(PATIENCE_S)
        while done < tickets:
            assert not deadline.is_over(), f"nothing is granted: {self.said()}"
            for grant in self._lease(tickets - done):
                self._held.append(grant.ref)
                self._play_ticket(grant)
                self._held.remove(grant.ref)
                self._finished.append(grant.ref)
                done += 1
        self._lease(0)

    def _lease(self, tickets: int) -> Sequence[ledger_wire.TicketGrant]:
        request = ledger_wire.LeaseRequest(
            CELL,
            tickets * EPISODES,
            self._held,
            self._finished,
            wait_s=1.0 if tickets else 0.0,
            splits=("train",),
        )
        reply = self.call("ledger", "/lease", request, ledger_wire.LeaseReply)
        self._finished = [ref for ref in self._finished if ref not in reply.over]
        return reply.grants

    def _play_ticket(self, grant: ledger_wire.TicketGrant) -> None:
        played = [self._play_episode(grant.ref, episode) for episode in range(grant.n_episodes)]
        request = proxy_wire.FinishTicketRequest(grant.ref, played)
        self.call("proxy", "/rl/finish_ticket", request, proxy_wire.FinishTicketReply)

    def _play_episode(self, ref: TicketRef, episode: int) -> str:
        opened = self.open_session(ref, episode)
        for question in ("hello", "go on"):
            body = {"messages": [{"role": "user", "content": question}]}
            assert self.ask(opened.api_key, "/v1/chat/completions", body).status_code == 200
        reward = {"reward": float(episode)}
        assert self.ask(opened.api_key, "/rl/set_reward", reward).status_code == 200
        assert self.ask(opened.api_key, "/rl/end_session", {}).status_code == 200
        return opened.session_id

    def open_session(
        self, ref: TicketRef | None = None, episode: int = 0
    ) -> proxy_wire.StartSessionReply:
        request = proxy_wire.StartSessionRequest("task", ref, episode)
        return self.call("proxy", "/rl/start_session", request, proxy_wire.StartSessionReply)

    def ask(self, key: str, route: str, body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return self.http.post(f"{self.url('proxy')}{route}", json=body, headers=headers)

    def seal(self) -> int:
        return self.call(
            "proxy", "/rl/seal", ledger_wire.Empty(), proxy_wire.SealTicketsReply
        ).tickets

    # The trainer -----------------------------------------------------------------------------

    def open_generation(self) -> None:
        """Be the next trainer, at the last step that was trained; the replica has its weights."""
        generation = claim_next_number(self.paths.generations_dir)
        request = ledger_wire.OpenTrainerGenerationRequest(generation, self.step)
        self.call("ledger", "/open_generation", request, ledger_wire.Acknowledged)
        self.version = WeightVersion(generation, self.step)
        self.serve()

    def serve(self) -> None:
        replica = self.await_replica()
        self._control(replica, "fence", {})
        for route in ("pause_generation", "begin_weight_update"):
            self._control(replica, route, {})
        self._control(replica, "end_weight_update", {"weight_version": str(self.version)})
        self._control(replica, "continue_generation", {})
        self._control(replica, "serve", {"version": str(self.version)})

    def await_replica(self) -> ReplicaView:
        self.await_true(lambda: self.replica().state in ("ready", "serving"))
        return self.replica()

    def replica(self) -> ReplicaView:
        return self.call("inference", "/replicas", None, ReplicasOfCell).replicas[0]

    def _control(self, replica: ReplicaView, route: str, body: Any) -> None:
        answer = self.http.post(
            f"{self.url('inference')}/replicas/{replica.index}/{route}",
            json=body,
            headers={
                **self.build_headers("inference"),
                "x-areal-incarnation": str(replica.incarnation),
                "x-areal-generation": str(self.version.generation),
            },
        )
        assert answer.status_code == 200, (route, answer.text, self.said())

    def train(self) -> BatchManifest:
        step = self.step + 1
        request = ledger_wire.BatchRequest(self.version.generation, step, 1.0)
        manifests: list[BatchManifest] = []

        def has_batch() -> bool:
            reply = self.call("ledger", "/batch", request, ledger_wire.BatchReply)
            manifests.extend([reply.manifest] if reply.manifest else [])
            return bool(manifests)

        self.await_true(has_batch)
        outcome = self._ranks.run(self.paths, "replay", trainer={"total_steps": step})
        assert outcome.codes == [0], outcome.log
        self.step = step
        self.open_generation()
        return manifests[0]


@contextmanager
def light_run(*arguments: Any, **settings: Any) -> Iterator[LightRun]:
    """A run whose services end with the block; its trainer has opened a generation."""
    run = LightRun(*arguments, **settings)
    try:
        run.open_generation()
        yield run
    finally:
        run.close()
