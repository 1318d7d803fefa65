"""Real coding harnesses by name before the real SGLang: read, run, edit, recorded token by token.

A grammar makes SGLang write the task's solution; the programs are unchanged.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web

from areal_hpc.agents.harness.harness_agent import HarnessAgent
from areal_hpc.agents.harness.programs import HARNESSES_DIR
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.agent import make_http_client
from areal_hpc.rollout.episodes.auxiliary import describe_known_auxiliary_call
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.agent_sandboxes import make_agent_sandboxes
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SamplingDefaults, StartSessionRequest
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.environments import CHECKOUT
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import CELL, start_web_app
from tests.support.sglang_server import serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

TASK = "Read greeting.py, run it, make it say good evening in place of good morning. Then say DONE."
OLD, NEW = "morning", "evening"
RUN = "python3 greeting.py"
_SED = f"sed -i s/{OLD}/{NEW}/ greeting.py"
Conversation = Callable[[str], list[str]]
"""Replies by the folder that the program works in."""


def call(tool: str, **arguments: Any) -> str:
    body = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


def _by_commands(tool: str, name: str = "command", **more: Any) -> Conversation:
    """A harness that is given commands alone."""
    commands = ("cat greeting.py", RUN, _SED)
    return lambda work: [*(call(tool, **{name: command}, **more) for command in commands), "DONE"]


CONVERSATIONS: dict[str, Conversation] = {
    "claude-code": lambda work: [
        call("Read", file_path=f"{work}/greeting.py"),
        call("Bash", command=RUN, description="Run it"),
        call("Edit", file_path=f"{work}/greeting.py", old_string=OLD, new_string=NEW),
        "DONE",
    ],
    "codex": _by_commands("exec_command", "cmd"),
    "gemini-cli": lambda work: [
        call("read_file", file_path=f"{work}/greeting.py"),
        call("run_shell_command", command=RUN),
        call(
            "replace",
            file_path=f"{work}/greeting.py",
            instruction="Say evening",
            old_string=OLD,
            new_string=NEW,
        ),
        "DONE",
    ],
    "qwen-code": lambda work: [
        call("read_file", file_path=f"{work}/greeting.py"),
        call("run_shell_command", command=RUN, is_background=False),
        call("edit", file_path=f"{work}/greeting.py", old_string=OLD, new_string=NEW),
        "DONE",
    ],
    "opencode": lambda work: [
        call("read", filePath=f"{work}/greeting.py"),
        call("bash", command=RUN, description="Run it"),
        call("edit", filePath=f"{work}/greeting.py", oldString=OLD, newString=NEW),
        "DONE",
    ],
    "pi": lambda work: [
        call("read", path="greeting.py"),
        call("bash", command=RUN),
        call("edit", path="greeting.py", edits=[{"oldText": OLD, "newText": NEW}]),
        "DONE",
    ],
    "mini-swe-agent": lambda work: [
        *_by_commands("bash")(work)[:3],
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "openhands": lambda work: [
        *_by_commands("terminal", summary="Look at it", security_risk="LOW")(work)[:3],
        "DONE",
    ],
    "kimi": lambda work: [
        call("Read", path="greeting.py"),
        call("Bash", command=RUN),
        call("Edit", path="greeting.py", old_string=OLD, new_string=NEW),
        "DONE",
    ],
    "continue": lambda work: [
        call("Read", filepath="greeting.py"),
        call("Bash", command=RUN),
        call("Edit", file_path="greeting.py", old_string=OLD, new_string=NEW),
        "DONE",
    ],
    "mistral-vibe": lambda work: [
        call("read_file", path="greeting.py"),
        call("bash", command=RUN),
        call("edit", file_path="greeting.py", old_string=OLD, new_string=NEW),
        "DONE",
    ],
    "copilot": _by_commands("bash", description="Do it"),
    "cline": _by_commands("run_commands"),
}


REF = TicketRef(1, 0)
CONTEXT_TOKENS = 131072
PROGRAM_S = 400.0
MARK = "HARNESS_SCENE"
"""Variable in the environment of a scene's processes."""
TASK_FOLDER_TEXTS = {
    "greeting.py": 'print("good morning")\n',
    "notes.txt": "greet in the evening\n",
}
WITH_TOOLS = "<tools>"
IN_THE_NOTES = "greet them in the evening"
LONG_NOTES = "".join(f"# line {number}: {IN_THE_NOTES}\n" for number in range(600))
SUMMARY = "The file was read and run. It has to be changed."
TOO_SHORT_FOR_THE_NOTES = {"opencode": 22000}
"""Harnesses that compact their history, and what they are told of the model's context: more than
their own instructions and the 8,192 tokens that a reply may have, less than these and the notes."""
IN_A_SANDBOX = ("continue", "opencode", "gemini-cli")
"""Harnesses of npm: a program of PyPI needs a Python that the sandbox's user may run."""


@dataclass(frozen=True)
class EngineCall:
    prompt: list[int]
    reply: list[int]
    said: str
    """Text of the forced reply."""


class ForcingRelay:
    """Relay between a proxy and SGLang; all but the forced text is SGLang's own."""

    def __init__(self, upstream: str, choose_reply: Callable[[list[int]], str]) -> None:
        self._upstream, self._choose_reply = upstream, choose_reply
        self.calls: list[EngineCall] = []
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._client = ClientSession(self._upstream, timeout=ClientTimeout(None))
        self._runner, self.url = await start_web_app(app)

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/generate":
            return await self._generate(request, json.loads(body))
        async with self._client.request(request.method, request.path_qs, data=body) as answer:
            kind = answer.content_type
            return web.Response(body=await answer.read(), status=answer.status, content_type=kind)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = self._choose_reply(body["input_ids"])
        sampling = body["sampling_params"]
        for name in ("regex", "json_schema", "structural_tag"):
            sampling.pop(name, None)
        sampling["ebnf"] = f"root ::= {json.dumps(text)}"
        reply: list[int] = []
        # Before the end, which the proxy does not wait for: it hangs up when it has the last token.
        self.calls.append(EngineCall(body["input_ids"], reply, text))
        async with self._client.post("/generate", json=body) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            if not body.get("stream"):
                whole = await answer.read()
                reply += json.loads(whole).get("output_ids", [])
                await passed.write(whole)
            else:
                async for line in answer.content:  # each event is one line
                    reply += _read_output_ids(line)
                    await passed.write(line)
        return passed


def _read_output_ids(line: bytes) -> list[int]:
    """The new tokens of an event of SGLang's incremental streams."""
    content = line.removeprefix(b"data: ").strip()
    if not content or content == b"[DONE]":
        return []
    ids: list[int] = json.loads(content).get("output_ids", [])
    return ids


def judge(
    *, folder: Path, diff: str, exit_code: int, timed_out: bool, log: str, data: Any
) -> Reward:
    is_right = (folder / "greeting.py").read_text().endswith('print("good evening")\n')
    note = f"exit {exit_code}, timed out: {timed_out}\n{log[-3000:]}"
    return Reward(float(is_right and exit_code == 0), note=note)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    texts = [page.read_text() for page in sorted((CHECKOUT / "docs").glob("*.md"))]
    make_tiny_model(path, texts, max_position_embeddings=CONTEXT_TOKENS, seed=5, vocab=4096)
    return path


@pytest.fixture(scope="module")
def sglang_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    length = {"context_tokens": CONTEXT_TOKENS, "total_tokens": CONTEXT_TOKENS}
    with serving(model_dir, log, "--weight-version", "1.0", **length) as url:
        yield url


class Scene:
    def __init__(
        self,
        name: str,
        folder: Path,
        model_dir: Path,
        sglang_url: str,
        told_context_tokens: int = CONTEXT_TOKENS,
    ) -> None:
        self.name, self.folder = name, folder
        self._told_context_tokens = told_context_tokens
        self.stage = Stage(
            folder,
            model_dir=model_dir,
            context_tokens=CONTEXT_TOKENS,
            tool_call_parser="qwen25",
            serve_python=get_interpreter("serve", "auto"),
        )
        self._encoder = self.stage.tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.turns = 0
        self.relay = ForcingRelay(sglang_url, self._choose_reply)
        self.stage.loop.run(self.relay.start())
        self.stage.route_to(self.relay.url)
        self.source = folder / "task"
        self.source.mkdir()
        for file, text in TASK_FOLDER_TEXTS.items():
            (self.source / file).write_text(text)

    def text_of(self, ids: list[int]) -> str:
        return self._encoder.decode(ids, skip_special_tokens=False)

    def is_played(self, prompt: str) -> bool:
        return WITH_TOOLS in prompt and TASK in prompt

    def _choose_reply(self, prompt_ids: list[int]) -> str:
        prompt = self.text_of(prompt_ids)
        if not self.is_played(prompt):
            return SUMMARY if IN_THE_NOTES in prompt else "A greeting"
        folders = re.findall(r"(/[\w./-]+/harness/work)\b", prompt)
        replies = CONVERSATIONS[self.name](folders[0] if folders else ".")
        self.turns += 1
        return replies[min(self.turns, len(replies)) - 1]

    def play(self, how: AgentExecutionConfig) -> EpisodeOutcome:
        agent = HarnessAgent(
            harness=self.name,
            harnesses_dir=str(HARNESSES_DIR),
            reward=f"{__name__}:judge",
            timeout_s=PROGRAM_S,
            context_tokens=self._told_context_tokens,
            # Requests to the rest of the world get no answer.
            variables={
                MARK: str(self.folder),
                **{"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"},
                "NO_PROXY": "127.0.0.1,localhost",
            },
        )
        session = StartSessionRequest(
            "task", REF, 0, SamplingDefaults(1.0), 11, sampling_from="recipe"
        )
        data = {"messages": [{"role": "user", "content": TASK}], "folder": str(self.source)}
        spec = EpisodeSpec(session, data, PROGRAM_S + 60, auxiliary=describe_known_auxiliary_call)

        async def run() -> EpisodeOutcome:
            sandboxes = make_agent_sandboxes(how, warm=0)
            directory, key = self.stage.paths.rendezvous_dir, self.stage.service_key
            proxy, http_client = (
                AsyncServiceClient(directory, f"proxy-{CELL}", key),
                make_http_client(60.0),
            )
            try:
                return await run_episode(spec, agent, proxy, http_client, sandboxes)
            finally:
                if sandboxes is not None:
                    await sandboxes.close()
                await http_client.aclose()
                await proxy.close()

        return asyncio.run(run())

    def describe(self, outcome: EpisodeOutcome) -> str:
        calls = [(len(call.prompt), call.said) for call in self.relay.calls]
        return f"{outcome}\n{calls}\n{self.stage.log[-6000:]}"

    def close(self) -> None:
        self.stage.loop.run(self.relay.stop())
        self.stage.close()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_harness_reads_runs_and_edits_and_all_of_it_is_recorded(
    name: str, tmp_path: Path, model_dir: Path, sglang_url: str
) -> None:
    with closing(Scene(name, tmp_path, model_dir, sglang_url)) as scene:
        check_episode(scene, AgentExecutionConfig())


@pytest.mark.parametrize("name", IN_A_SANDBOX)
def test_a_harness_does_the_same_in_a_sandbox_that_reaches_the_model_alone(
    name: str, tmp_path: Path, model_dir: Path, sglang_url: str
) -> None:
    sandbox = {
        "network": "session-only",
        "readonly_folders": [str(HARNESSES_DIR)],
        "memory_bytes": 16 << 30,
    }
    how = AgentExecutionConfig.model_validate({"isolation": "bwrap", "sandbox": sandbox})
    with closing(Scene(name, tmp_path, model_dir, sglang_url)) as scene:
        check_episode(scene, how)


def check_episode(scene: Scene, how: AgentExecutionConfig) -> None:
    outcome = scene.play(how)
    report = scene.describe(outcome)
    assert outcome.status == "ok", report
    scene.stage.finish_ticket(REF, outcome.session_id)
    scene.stage.seal()
    sealed = scene.stage.sealed_rows(REF)
    rows = [row for row in sealed if not row.record.auxiliary_reason]
    assert outcome.reward == 1.0, (report, rows[0].record.calls[-1].reward)
    check_rows(scene, rows, [row for row in sealed if row.record.auxiliary_reason])
    wait_for(lambda: not list_processes_of(scene.folder), 30)


def list_processes_of(folder: Path) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_text())
        except OSError:  # it has ended
            continue
    return commands


def check_rows(scene: Scene, rows: list[TrajectoryRow], beside: list[TrajectoryRow]) -> None:
    """Check the task's row, each turn as the engine read and wrote it, and the named rest."""
    (row,) = rows
    turns = [call for call in scene.relay.calls if scene.is_played(scene.text_of(call.prompt))]
    assert [call.reuse for call in row.record.calls] == ["none"] + ["reused"] * (len(turns) - 1)
    ids = row.input_ids_T.tolist()
    for turn in turns:
        end = len(turn.prompt) + len(turn.reply)
        assert ids[:end] == turn.prompt + turn.reply
        assert row.loss_mask_T[len(turn.prompt) : end].tolist() == [1] * len(turn.reply)
    assert len(beside) == len(scene.relay.calls) - len(turns)
    assert all(row.record.auxiliary_reason for row in beside)


class CompactingScene(Scene):
    """A harness that reads more than its context holds, and goes on from a summary."""

    def is_played(self, prompt: str) -> bool:
        return WITH_TOOLS in prompt  # the task's text may have gone with the history


@pytest.mark.parametrize(("name", "context_tokens"), TOO_SHORT_FOR_THE_NOTES.items())
def test_a_history_that_its_harness_compacts_becomes_branches_and_nothing_is_lost(
    name: str, context_tokens: int, tmp_path: Path, model_dir: Path, sglang_url: str
) -> None:
    scene = CompactingScene(name, tmp_path, model_dir, sglang_url, context_tokens)
    with closing(scene):
        (scene.source / "greeting.py").write_text(LONG_NOTES + TASK_FOLDER_TEXTS["greeting.py"])
        outcome = scene.play(AgentExecutionConfig())
        report = scene.describe(outcome)
        assert (outcome.status, scene.relay.calls[-1].said) == ("ok", "DONE"), report
        scene.stage.finish_ticket(REF, outcome.session_id)
        scene.stage.seal()
        rows = [row for row in scene.stage.sealed_rows(REF) if not row.record.auxiliary_reason]
        check_branches(rows, [call for call in scene.relay.calls if call.said != "A greeting"])
        assert outcome.reward == 1.0, report


def check_branches(rows: list[TrajectoryRow], calls: list[EngineCall]) -> None:
    """Check that each call begins a row, with the engine's ids, and is trained once."""
    assert SUMMARY in [call.said for call in calls]
    assert len(rows) > 1
    for call in calls:
        ids = call.prompt + call.reply
        assert ids in [row.input_ids_T[: len(ids)].tolist() for row in rows]
    assert sum(int(row.loss_mask_T.sum()) for row in rows) == sum(len(call.reply) for call in calls)
    for row in rows:
        reuse = [call.reuse for call in row.record.calls]
        assert reuse == ["none"] + ["reused"] * (len(reuse) - 1)
