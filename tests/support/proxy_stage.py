"""A real proxy process on a stage of stand-ins, and a driver's calls to it."""

import http.client
import itertools
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec
from anthropic import Anthropic
from openai import OpenAI

from areal_hpc.proxy.sessions.store import (
    InteractionAdded,
    SessionOpened,
    compute_key_digest,
    decode_event,
)
from areal_hpc.recipe.sections.inference import ProxyConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key
from areal_hpc.session.tree import Interaction
from areal_hpc.shards.index import read_index
from areal_hpc.shards.journal import read_journal
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    ExportSettings,
    FinishTicketRequest,
    SamplingDefaults,
    SessionLimits,
    StartSessionRequest,
)
from areal_hpc.wire.replicas import ReplicaState
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.chatml import byte_level_tokenizer, write_model_dir
from tests.support.deadlines import scaled
from tests.support.forked_processes import ForkedProcess, fork_job_process
from tests.support.role_recipe import write_role_recipe
from tests.support.scripted_sglang import (
    CELL,
    LoopThread,
    Script,
    ScriptedSGLang,
    StandInLedger,
    StandInRelay,
)
from tests.support.waiting import wait_for

PATIENCE_S = 180.0
"""Time limit of any wait, on however busy a machine."""
NO_HEADERS: Mapping[str, str] = {}


class Stage:
    """A run directory with relay, ledger, one scripted SGLang and a proxy process.

    `config` is more of the proxy's own, `constants` are limits of its modules.
    """

    def __init__(
        self,
        root: Path,
        *,
        model_dir: Path | None = None,
        context_tokens: int = 2048,
        max_open_files: int = 0,
        constants: Mapping[str, int] | None = None,
        **config: Any,
    ) -> None:
        self._max_open_files = max_open_files
        self._constants = constants
        self.paths = RunPaths(root / "run")
        self.admin_key = rendezvous.ensure_admin_key(self.paths.admin_key)
        self.service_key = rendezvous.ensure_service_key(self.paths.service_key)
        self.driver_key = derive_bearer_key(self.service_key, f"proxy-{CELL}")
        self.model_dir = model_dir or write_model_dir(root / "model")
        self.journal_dir = root / "journal"
        self.tokenizer = byte_level_tokenizer()
        self.loop = LoopThread()
        self.sglang = ScriptedSGLang(self.tokenizer)
        self.relay = StandInRelay(self.paths.rendezvous_dir, self.service_key)
        self.ledger = StandInLedger(self.paths.rendezvous_dir, self.service_key)
        for part in (self.sglang, self.relay, self.ledger):
            self.loop.run(part.start())
        self.relay.show(self.sglang.url)
        self._config_path = root / "proxy.json"
        self._log_path = root / "proxy.log"
        given = config.pop("proxy", {})
        limits = {name: given[name] for name in given if name not in ProxyConfig.model_fields}
        parsers = ("tool_call_parser", "reasoning_parser")
        shards = {"seal_after_s": 3600.0}
        write_role_recipe(
            self.paths,
            proxy={name: given[name] for name in given if name not in limits},
            shards={**shards, **config.pop("shards", {})},
            inference={
                "context_length": context_tokens,
                **{name: config.pop(name) for name in parsers if name in config},
            },
            rollout={"agent": config.pop("agent", {})},
        )
        self.configure(
            {
                "run_dir": str(self.paths.root),
                "cell": CELL,
                "model_path": str(self.model_dir),
                "limits": limits,
                **config,
            }
        )
        self.http = httpx.Client(timeout=scaled(PATIENCE_S), trust_env=False)
        self._process: ForkedProcess | None = None
        self.start_proxy()

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        endpoint = rendezvous.find_endpoint(self.paths.rendezvous_dir, f"proxy-{CELL}")
        assert endpoint is not None
        return endpoint.url

    def configure(self, config: dict[str, Any]) -> None:
        """Change the configuration of the next start."""
        self.config = config
        self._config_path.write_text(json.dumps(config))

    def start_proxy(self) -> None:
        """Start it and wait until it answers and routes."""
        entry = "areal_hpc.proxy.job:run"
        process = fork_job_process(
            entry,
            self._config_path,
            self._log_path,
            max_open_files=self._max_open_files,
            constants=self._constants,
            environ={**os.environ, "SLURM_TMPDIR": str(self.journal_dir)},
        )
        self._process = process

        def is_up() -> bool:
            assert process.poll() is None, self.log
            endpoint = rendezvous.find_endpoint(self.paths.rendezvous_dir, f"proxy-{CELL}")
            return endpoint is not None and endpoint.pid == process.pid

        wait_for(is_up, PATIENCE_S, lambda: self.log)

    def route_to(self, *urls: str, state: ReplicaState = "serving") -> None:
        self.relay.show(*urls, state=state)
        self.await_polls()

    def await_polls(self) -> None:
        polls = self.relay.polls
        wait_for(lambda: self.relay.polls >= polls + 2, PATIENCE_S, every_s=0.01)

    def kill_proxy(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart_proxy(self) -> None:
        self.kill_proxy()
        self.start_proxy()

    def stop_proxy(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(scaled(PATIENCE_S)) == 0, self.log

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill_proxy()
        self.http.close()
        for part in (self.sglang, self.relay, self.ledger):
            self.loop.run(part.stop())
        self.loop.stop()

    @property
    def journal(self) -> Path:
        (journal,) = self.journal_dir.glob("*/journal")
        return journal

    def journaled(self, key: str) -> list[Interaction]:
        events = [decode_event(record.payload) for record in read_journal(self.journal)]
        digest = compute_key_digest(key)
        (session_id,) = (
            event.session_id
            for event in events
            if isinstance(event, SessionOpened) and event.key_digest == digest
        )
        return [
            event.interaction
            for event in events
            if isinstance(event, InteractionAdded) and event.session_id == session_id
        ]

    def await_journaled(self, key: str, count: int = 1) -> list[Interaction]:
        """The same, once there are so many."""
        wait_for(lambda: len(self.journaled(key)) >= count, PATIENCE_S, lambda: self.log)
        return self.journaled(key)

    def untrained_rows(self, session_id: str) -> list[TrajectoryRow]:
        """Rows of an episode that is sealed and never trained on; none before it is sealed."""
        return [
            row
            for shard in read_index(self.paths.shard_index_dir)
            for ticket in shard.untrained
            if ticket.session_id == session_id
            for row in ShardReader(self.paths.shards_dir / shard.file).read_rows(ticket.rows)
        ]

    def sealed_rows(self, ref: TicketRef) -> list[TrajectoryRow]:
        """Rows of the only shard that holds the ticket."""
        (shard,) = (
            shard
            for shard in read_index(self.paths.shard_index_dir)
            if ref in [TicketRef(ticket.ticket_id, ticket.attempt) for ticket in shard.tickets]
        )
        return ShardReader(self.paths.shards_dir / shard.file).read_rows([*range(shard.rows)])

    def speak_in_letters(self, text: str = "hello", finish: str = "length") -> list[int]:
        """Let the model say a text in tokens that no tokenizer would choose; the tokens."""
        letters = [token for letter in text for token in self.tokenizer.encode(letter).ids]
        self.sglang.script = lambda request: Script(text, finish, output_ids=letters)
        return letters

    def assert_continued(self, reply_ids: list[int]) -> None:
        """Check that each prompt begins with the one before and the model's own tokens."""
        prompts = [request["input_ids"] for request in self.sglang.requests]
        assert len(prompts) > 1
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before) + len(reply_ids)] == before + reply_ids

    def prompt_of(self, request: dict[str, Any]) -> str:
        return self.tokenizer.decode(request["input_ids"], skip_special_tokens=False)

    def catch_up(self) -> None:
        """Return when the proxy has read all that came before: it takes connections in turn."""
        for _ in range(2):
            httpx.get(f"{self.url}/healthz", timeout=scaled(PATIENCE_S), trust_env=False)

    # A driver's calls -----------------------------------------------------------------------

    def post(
        self, route: str, body: Any, key: str | None = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> httpx.Response:
        """A call with a key, or with the driver's. Bytes are sent as they are."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        authorized = {"authorization": f"Bearer {key or self.driver_key}", **headers}
        return self.http.post(f"{self.url}{route}", content=content, headers=authorized)

    def stream(
        self, route: str, body: Mapping[str, Any], key: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> AbstractContextManager[httpx.Response]:
        authorized = {"authorization": f"Bearer {key}", **headers}
        content = {**body, "stream": True}
        return self.http.stream("POST", f"{self.url}{route}", json=content, headers=authorized)

    def begin(self, route: str, body: Any, key: str | None = None) -> http.client.HTTPConnection:
        """A call that waits at the proxy on return; its answer comes by this connection."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=scaled(PATIENCE_S))
        headers = {"authorization": f"Bearer {key or self.driver_key}"}
        connection.request("POST", route, msgspec.json.encode(body), headers)
        self.catch_up()
        return connection

    def open_session(
        self,
        ref: TicketRef | None = None,
        *,
        episode: int = 0,
        export: ExportSettings | None = None,
        limits: SessionLimits | None = None,
        records_calls: bool = True,
        sampling_from: Literal["agent", "recipe"] = "agent",
        records_sampling_mask: bool = False,
        **sampling: Any,
    ) -> tuple[str, str]:
        request = StartSessionRequest(
            "task",
            ref,
            episode,
            SamplingDefaults(**sampling),
            export=export or ExportSettings(),
            limits=limits or SessionLimits(),
            records_calls=records_calls,
            sampling_from=sampling_from,
            records_sampling_mask=records_sampling_mask,
        )
        reply = self.post("/rl/start_session", request)
        assert reply.status_code == 200, reply.text
        return reply.json()["session_id"], reply.json()["api_key"]

    def chat(
        self, key: str, messages: Sequence[Mapping[str, object]], **more: Any
    ) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": messages, **more}, key)

    def ask(self, key: str, text: str, **more: Any) -> httpx.Response:
        return self.chat(key, [{"role": "user", "content": text}], **more)

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=8)

    def anthropic(self, key: str) -> Anthropic:
        return Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def finish_session(self, key: str, reward: float) -> None:
        assert self.post("/rl/set_reward", {"reward": reward}, key).status_code == 200
        self.end_session(key)

    def end_session(self, key: str) -> int:
        """End a session, and return its number of interactions."""
        reply = self.post("/rl/end_session", {}, key)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["interaction_count"])

    def finish_ticket(self, ref: TicketRef, *session_ids: str) -> int:
        """Finish a ticket, and return its number of rows."""
        reply = self.post("/rl/finish_ticket", FinishTicketRequest(ref, [*session_ids]))
        assert reply.status_code == 200, reply.text
        return int(reply.json()["rows"])

    def seal(self) -> int:
        reply = self.post("/rl/seal", {})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["tickets"])
