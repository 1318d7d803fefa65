"""Process of a trial: it plays each task once, and prints conversation, reward and rows.

The real proxy, in front of a stand-in engine or a given SGLang server, runs in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import uvloop
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request

from areal_hpc.errors import AgentError, ArealError, ClusterError, RecipeError, escape_controls
from areal_hpc.jobs.processes.process_setup import StopRequest, set_up_logging
from areal_hpc.launch.trial import TrialConfig
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import StaticReplicaSource
from areal_hpc.proxy.service import LISTEN_BACKLOG, ProxyService
from areal_hpc.proxy.sessions.recorder import MemoryRecorder
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.agent import Agent, make_http_client
from areal_hpc.rollout.episode_watch import EpisodeWatch
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import (
    EpisodeSpec,
    build_episode_spec,
    derive_episode_seed,
)
from areal_hpc.rollout.execution.agent_sandboxes import make_agent_sandboxes, try_sandbox
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.job import build_agent, build_source_agents
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, ensure_service_key, format_proxy_name
from areal_hpc.rundir.run_inputs import TaskSet, TrainSources
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import Interaction
from areal_hpc.trainer.batch.untrained import count_untrainable_tokens
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.http_server import JsonApp, ServiceServer, read_body
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SamplingDefaults

LOOPBACK_HOST = "127.0.0.1"
DRAIN_TIMEOUT_S = 1
MAX_RANDOM_REPLY_TOKENS = 48
"""Maximum length of a random reply; a longer one shows nothing more."""
MAX_REQUEST_BYTES = 1 << 28
WEIGHT_VERSION = "default"
"""SGLang's default version of weights."""
GRAMMAR_NAMES = ("json_schema", "regex", "ebnf", "structural_tag")


@contextlib.contextmanager
def open_trial_cell(config: TrialConfig) -> Iterator[TrialCell]:
    """Run proxy and engine while the context lasts.

    They have a thread of their own: as in a run, where the proxy is another process, an agent that
    blocks its event loop must not stop them.
    """
    cell = TrialCell(config)
    thread = threading.Thread(target=cell.run_event_loop, name="trial-cell", daemon=True)
    thread.start()
    cell.is_ready.wait()
    if cell.failure is not None:
        raise cell.failure
    try:
        yield cell
    finally:
        cell.stop.request()
        thread.join()


class TrialCell:
    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self.stop = StopRequest()
        self.is_ready = threading.Event()
        self.failure: BaseException | None = None
        self._recorder: MemoryRecorder | None = None
        self._engine: StandInEngine | None = None

    def get_session(self, session_id: str) -> Session:
        assert self._recorder is not None
        return self._recorder.store.sessions[session_id]

    @property
    def ignored_grammars(self) -> list[str]:
        return sorted(self._engine.ignored_grammars) if self._engine else []

    def run_event_loop(self) -> None:
        try:
            uvloop.run(self._serve_cell())
        except BaseException as error:  # boundary: raised in the thread that waits
            self.failure = error
        finally:
            self.is_ready.set()

    async def _serve_cell(self) -> None:
        job, paths = self._config.proxy, RunPaths(self._config.proxy.run_dir)
        inference = job.recipe.inference
        model = ServedModel.from_model_dir(
            job.recipe.experiment_name,
            job.model_path,
            inference.context_length,
            inference.tool_call_parser,
            inference.reasoning_parser,
        )
        self._recorder = MemoryRecorder(model.encoder.vocab_size)
        name = rendezvous.format_proxy_name(job.cell)
        async with self._open_engine(model) as url:
            service = ProxyService(
                job.proxy_limits,
                model,
                job.serve_python,
                rendezvous.ensure_admin_key(paths.admin_key),
                self._recorder,
                StaticReplicaSource([url]),
                driver_key=derive_bearer_key(
                    rendezvous.ensure_service_key(paths.service_key), name
                ),
            )
            try:
                listener = socket.create_server((LOOPBACK_HOST, 0), backlog=LISTEN_BACKLOG)
                proxy_url = f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
                rendezvous.publish_endpoint(paths.rendezvous_dir, name, proxy_url)
                self.is_ready.set()
                await service.run(listener, self.stop, DRAIN_TIMEOUT_S)
            finally:
                await service.close()

    @contextlib.asynccontextmanager
    async def _open_engine(self, model: ServedModel) -> AsyncIterator[str]:
        if self._config.sglang_url is not None:
            yield self._config.sglang_url
            return
        if not model.end_token_ids:
            raise RecipeError(
                f"{self._config.proxy.model_path} does not say eos_token_id",
                key="model",
                hint="copy generation_config.json of the base model into it",
            )
        self._engine = StandInEngine(model.encoder, model.end_token_ids[0])
        server = ServiceServer(self._engine)
        listener = socket.create_server((LOOPBACK_HOST, 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


class _SamplingParams(Struct):
    max_new_tokens: int
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class _GenerateRequest(Struct):
    input_ids: list[int]
    sampling_params: _SamplingParams
    rid: str = ""
    stream: bool = False
    top_logprobs_num: int = 0


class StandInEngine(JsonApp):
    """HTTP server with the routes of SGLang that the proxy calls.

    A reply consists of random plain-text tokens; equal seeds and prompt lengths get equal replies.
    """

    def __init__(self, encoder: TokenEncoder, end_id: int) -> None:
        super().__init__()
        self._encoder, self._end_id = encoder, end_id
        self._text_ids = encoder.list_plain_text_token_ids()
        self.ignored_grammars: set[str] = set()
        """Names of the grammars in requests; replies do not follow them."""

    async def answer(self, request: Request) -> tuple[int, bytes]:
        match request.method, request.scope["path"]:
            case "GET", "/ready":
                return 200, b"{}"
            case "GET", "/model_info":
                return 200, msgspec.json.encode({"weight_version": WEIGHT_VERSION})
            case "POST", "/abort_request":
                return 200, b"{}"
            case "POST", "/generate":
                body = await read_body(request, MAX_REQUEST_BYTES)
                return 200, self._generate(decode_json(body, _GenerateRequest))
        raise HTTPException(404, "no such route")

    def _generate(self, request: _GenerateRequest) -> bytes:
        sampling = request.sampling_params
        self.ignored_grammars.update(
            name for name in GRAMMAR_NAMES if getattr(sampling, name) is not None
        )
        rng = random.Random(f"{sampling.sampling_seed or 0}/{len(request.input_ids)}")
        length = rng.randint(1, min(sampling.max_new_tokens, MAX_RANDOM_REPLY_TOKENS))
        ids = rng.choices(self._text_ids, k=length)
        is_ended = length < sampling.max_new_tokens
        ids += [self._end_id] if is_ended else []
        count = len(ids)
        logprobs = [(-math.log(len(self._text_ids)), id_, None) for id_ in ids]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": {"type": "stop", "matched": self._end_id}
            if is_ended
            else {"type": "length", "length": count},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": logprobs,
            "weight_version": WEIGHT_VERSION,
            "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": count}],
        }
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = [[logprob] for logprob in logprobs]
        text = self._encoder.decode(ids[:-1] if is_ended else ids, skip_special_tokens=True)
        encoded = msgspec.json.encode({"text": text, "output_ids": ids, "meta_info": meta})
        return b"data: " + encoded + b"\n\ndata: [DONE]\n\n" if request.stream else encoded


MAX_SHOWN_CHARS = 1200
MAX_PRINTED_LINES = 5
LABEL_WIDTH = 11
REUSE_TEXTS = {"reused": ", prompt re-used", "retokenized": ", prompt tokenized again"}


def format_trial(
    episode_number: int, outcome: EpisodeOutcome, session: Session, printed: str = ""
) -> Iterator[str]:
    """Format an episode's messages, the agent's output `printed`, and the rows to train."""
    yield f"--- task {episode_number} {'-' * 60}"
    lines = printed.splitlines()
    if len(lines) > MAX_PRINTED_LINES:
        lines = [f"{len(lines)} lines, of which the last:", *lines[-MAX_PRINTED_LINES:]]
    yield from _format_labeled("printed", lines)
    shows_agent = len({interaction.agent_id for interaction in session.tree}) > 1
    for call, interaction in enumerate(session.tree, start=1):
        agent = f" of agent {interaction.agent_id or '(no id)'}" if shows_agent else ""
        yield from _format_interaction(f"call {call}{agent}", interaction)
    for name, count in session.count_uses_of_ignored_params().items():
        yield from _format_labeled("no effect", [f"{name}, in {count} calls"])
    if outcome.status == "ok":
        yield from _format_labeled("reward", [f"{outcome.reward:g}"])
        yield from _format_labeled("rows", list(_describe_rows(session)))
        return
    trace = outcome.error.trace if outcome.error else ""
    lines = [*str(outcome.error or outcome.reason).splitlines(), *trace.splitlines()]
    if not len(session.tree):
        lines.append("no call to the model had been answered")
    yield from _format_labeled("FAILED", lines)


def format_trial_summary(
    outcomes: Sequence[EpisodeOutcome], ignored_grammars: Sequence[str]
) -> Iterator[str]:
    rewards = [outcome.reward for outcome in outcomes if outcome.status == "ok"]
    summary = f"{len(rewards)} of {len(outcomes)} episodes ended well"
    if rewards:
        listed = " ".join(f"{reward:g}" for reward in rewards)
        summary += f"; rewards from {min(rewards):g} to {max(rewards):g}: {listed}"
    yield "-" * 71
    yield summary
    if ignored_grammars:
        yield (
            f"the agent asked for replies by {', '.join(ignored_grammars)}, which the stand-in "
            "does not follow; --base-url uses a real server"
        )


def _format_interaction(title: str, interaction: Interaction) -> Iterator[str]:
    tools = json.loads(interaction.context or b"null")
    if tools and tools[0]:
        yield from _format_labeled(
            "tools", [", ".join(tool["function"]["name"] for tool in tools[0])]
        )
    for message in (*interaction.new_messages, interaction.reply):
        yield from _format_message(message)
    yield (
        f"{'':<{LABEL_WIDTH}}[{title}: {interaction.prompt_tokens} prompt tokens, "
        f"{interaction.num_output_tokens} of the reply, ended by {interaction.finish_reason}"
        f"{REUSE_TEXTS.get(interaction.reuse, '')}]"
    )


def _format_message(message: dict[str, Any]) -> Iterator[str]:
    parts = [("reasoning", reasoning)] if (reasoning := message.get("reasoning_content")) else []
    content, tool_calls = message.get("content"), message.get("tool_calls") or ()
    if content or not tool_calls:
        parts.append((message["role"], content))
    for function in (tool_call["function"] for tool_call in tool_calls):
        arguments = _to_text(function["arguments"])
        parts.append(("tool call", f"{function['name']}({arguments})"))
    for label, part in parts:
        text = _to_text(part)
        more = len(text) - MAX_SHOWN_CHARS
        shown = text[:MAX_SHOWN_CHARS] + (f" ... and {more} more characters" if more > 0 else "")
        # Random tokens may be control characters, which a terminal would execute.
        lines = [
            "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
            for line in shown.splitlines() or [""]
        ]
        yield from _format_labeled(label, lines)


def _to_text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _describe_rows(session: Session) -> Iterator[str]:
    rows = session.build_rows(TicketRef(0, 0), "trial")
    yield str(len(rows)) if rows else "none: no reward reaches a reply"
    for row in rows:
        trained, calls = int(row.loss_mask_T.sum()), len(row.record.calls)
        yield (
            f"row {row.row}: {row.num_tokens} tokens, {row.num_tokens - trained} of prompts and "
            f"{trained} of replies, which are trained; {calls} call{'s' if calls > 1 else ''}, "
            f"reward {row.reward:g}"
        )
    if rows and (unrewarded := rows[0].record.unrewarded_replies):
        yield f"{unrewarded} replies are not trained: no reward reaches them"
    # The stand-in records no sampling mask: assume the one that a run would record.
    untrainable = count_untrainable_tokens(
        rows, assumes_sampling_mask=session.request.records_sampling_mask
    )
    for reasons, tokens in untrainable.items():
        yield f"{tokens} tokens of replies leave the loss: they were sampled with {reasons}"


def _format_labeled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{'' if index else label:<{LABEL_WIDTH}}{line}".rstrip()


def main() -> None:
    set_up_logging(logging.WARNING)
    config = TrialConfig.model_validate_json(sys.stdin.read())
    sys.path[:0] = [folder for folder in config.driver.sys_path if folder not in sys.path]
    try:
        rollout = config.driver.recipe.rollout
        agent = build_agent(rollout.agent, rollout.workflow, rollout.workflow_kwargs)
        assert agent is not None  # mode online is refused before this process starts
        agents = [own or agent for own in build_source_agents(config.driver.recipe)] or [agent]
        with open_trial_cell(config) as cell:
            failures = asyncio.run(_play_tasks(config, agents, cell))
    except ArealError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(AgentError.exit_code if failures else 0)


async def _play_tasks(config: TrialConfig, agents: Sequence[Agent], cell: TrialCell) -> int:
    """Play each task once with its source's agent; return the number of failures."""
    job, paths = config.driver, RunPaths(config.driver.run_dir)
    rollout = job.recipe.rollout
    workers = [agent for agent in agents if isinstance(agent, SubprocessAgent)]
    for worker in workers:
        await worker.check_agent_builds()
    await try_sandbox(rollout.agent)  # as a driver does
    key = ensure_service_key(paths.service_key)
    proxy = AsyncServiceClient(paths.rendezvous_dir, format_proxy_name(job.cell), key)
    http_client: Any = make_http_client(rollout.episode_timeout_s)
    tasks = TaskSet.read(paths.dataset("train"))
    names = job.recipe.train_source_names
    sources = TrainSources.read(paths.train_source_sizes, names)
    sandboxes = None
    if not workers:
        sandboxes = make_agent_sandboxes(rollout.agent, warm=0)
    outcomes: list[EpisodeOutcome] = []
    first_failures: dict[str, int] = {}
    watching = asyncio.create_task(EpisodeWatch(EventLog(paths.events, "trial")).run())
    try:
        for number in range(len(tasks)):
            agent = agents[sources.find_index(number)]
            # To a file, because agents pass their standard output to programs.
            with tempfile.TemporaryFile("w+") as stdout:
                with contextlib.redirect_stdout(stdout):
                    outcome = await run_episode(
                        _build_trial_spec(rollout, agent, tasks[number], number),
                        agent,
                        proxy,
                        http_client,
                        sandboxes,
                    )
                stdout.seek(0)
                printed = stdout.read()
            outcomes.append(outcome)
            if outcome.is_node_short:
                raise ClusterError(outcome.reason)
            if outcome.status != "ok":
                failure = str(outcome.error or outcome.reason)
                first = first_failures.setdefault(failure, number)
                if first != number:
                    print(f"--- task {number} failed as task {first} did", flush=True)
                    continue
            session = cell.get_session(outcome.session_id)
            lines = format_trial(number, outcome, session, printed)
            print(escape_controls("\n".join(lines)), flush=True)
    finally:
        watching.cancel()
        await http_client.aclose()
        await proxy.close()
        for worker in workers:
            worker.close()
    print("\n".join(format_trial_summary(outcomes, cell.ignored_grammars)), flush=True)
    return sum(outcome.status != "ok" for outcome in outcomes)


def _build_trial_spec(
    rollout: RolloutConfig, agent: Agent, task: dict[str, Any], number: int
) -> EpisodeSpec:
    """Build an episode like one of training, in a session without a ticket.

    The proxy keeps such a session in memory only, and drops it soon after its end.
    """
    return build_episode_spec(
        rollout,
        agent,
        {**task},
        f"trial-{number}",
        sampling=SamplingDefaults(**rollout.sampling.model_dump()),
        seed=derive_episode_seed(number, 0, 0),
        auxiliary=load_auxiliary_rule(rollout.agent.auxiliary),
        records_sampling_mask=rollout.record_sampling_mask,
        disposable=True,
    )


if __name__ == "__main__":
    main()
