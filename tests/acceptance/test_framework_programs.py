"""Programs of SDKs and agent frameworks against `areal-hpc proxy`, recorded token by token.

SDKs of Python are in `tests/integration/proxy` and `tests/integration/agents`.

The model is scripted, SGLang's parsers are real, and nothing of the frameworks is changed.
`scripts/setup_framework_programs.sh` installs them.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.environments import CHECKOUT
from tests.support.gym_stage import GymStage
from tests.support.scripted_sglang import Script

pytestmark = pytest.mark.timeout(400)
WITH_TOOLS = "<|im_start|>system\n# Tools\n"
TOO_SHORT_A_CONTEXT = "100"

INSTALLED = CHECKOUT / ".venvs" / "harnesses"
NODE_MODULES = INSTALLED / "node" / "node_modules"
PROGRAMS = Path(__file__).parent / "harness_programs"
TASK = "Run a command that prints seventeen. Then run it again. Then say DONE."
COMMAND = "echo seventeen"
PATIENCE_S = 300.0
SILENCE_S = 11.0
"""Period longer than the silence of a stream."""
DIALECTS = ("chat", "responses", "messages")


def call(tool: str, **arguments: object) -> str:
    body = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


_RUN = call("run_command", command=COMMAND)
THOUGHT = "<think>\nIt has to be run.\n</think>\n\nLet me see.\n"


@dataclass(frozen=True)
class FrameworkProgram:
    command: tuple[str, ...]
    """The script and its arguments before the task."""
    rows: int = 1
    """Exported rows: conversations that the program does not go on with make more."""
    rows_with_two_calls: int = 0
    """Exported rows where each turn has reasoning, text and two calls; 0: no such turns."""
    says: tuple[str, ...] = (_RUN, _RUN, "DONE")
    ignored: frozenset[str] = frozenset()
    """Parameters that it sends and the proxy ignores."""
    overflow: str = ""
    """Output of a program that recognizes a prompt too long for the model."""
    environment: str = "python"
    """Folder of the Python that has the framework."""
    knows_task_by: str = WITH_TOOLS
    """Text that prompts of the task have beside the task itself."""

    def run(self, url: str, key: str, home: Path) -> subprocess.CompletedProcess[str]:
        workplace = home / "work"
        workplace.mkdir(parents=True)
        script = Path(shutil.copy(PROGRAMS / self.command[0], workplace))
        (workplace / "node_modules").symlink_to(NODE_MODULES)
        environment = {
            **{"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
            **{"DO_NOT_TRACK": "1", "TERM": "dumb", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key},
            **{"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
            # Requests to the rest of the world get no answer.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        interpreter = INSTALLED / self.environment / "bin" / "python"
        if script.suffix == ".mjs":
            interpreter = NODE_MODULES / ".bin" / "node"
        return subprocess.run(
            [str(interpreter), str(script), *self.command[1:], TASK],
            cwd=workplace,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def get_replies(self, with_two_calls: bool) -> list[str]:
        if not with_two_calls:
            return [*self.says]
        *turns, end = self.says
        twice = [f"{turn}\n{turn}" if turn.startswith("<tool_call>") else turn for turn in turns]
        return [THOUGHT + turn for turn in (*twice, end)]


def _say_fields(**fields: str) -> str:
    """A reply as DSPy reads it."""
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + (
        "[[ ## completed ## ]]"
    )


_STEP = _say_fields(
    next_thought="It has to be run.",
    next_tool_name="run_command",
    next_tool_args=json.dumps({"command": COMMAND}),
)

_TYPICAL = FrameworkProgram((), rows_with_two_calls=1, environment="frameworks")


def _program(script: str, *arguments: str, **more: Any) -> FrameworkProgram:
    """Build a program whose turns are one row, with one call each or with two."""
    return replace(_TYPICAL, command=(script, *arguments), **more)


def _in_dialects(
    name: str, program: FrameworkProgram, *dialects: str
) -> dict[str, FrameworkProgram]:
    """A program in each of its dialects, streamed and whole, by its name and theirs."""
    rows = {}
    for dialect in dialects:
        whole = replace(program, command=(*program.command, dialect, "whole"))
        stream = (*program.command, dialect, "stream")
        rows[f"{name}-{dialect}"] = whole
        rows[f"{name}-{dialect}-stream"] = replace(program, command=stream, overflow="")
    return rows


_SAYS_OF_THREE_QUESTIONS = (_RUN, "Seventeen.", _RUN, "Yes.", "DONE")
_CODE = f"Run it.\n<code>\nprint(run_command({COMMAND!r}))\n</code>"
FRAMEWORKS = {
    "openai-node-chat": _program(
        "openai_node.mjs",
        "chat",
        rows_with_two_calls=3,  # its helper keeps the last piece of the reasoning alone
    ),
    "openai-node-responses": _program("openai_node.mjs", "responses"),
    "anthropic-node": _program("anthropic_node.mjs"),
    "google-node": _program("google_node.mjs"),
    **_in_dialects(
        "vercel-ai", _program("vercel_ai.mjs", says=_SAYS_OF_THREE_QUESTIONS), "default", "chat"
    ),
    "vercel-ai-messages": _program(
        "vercel_ai.mjs", "messages", "whole", says=_SAYS_OF_THREE_QUESTIONS
    ),
    "vercel-ai-messages-stream": _program(
        *("vercel_ai.mjs", "messages", "stream"),
        says=_SAYS_OF_THREE_QUESTIONS,
        ignored=frozenset({"tools[].eager_input_streaming"}),
    ),
    **_in_dialects(
        "litellm",
        _program("litellm_client.py", overflow="ContextWindowExceeded"),
        *("openai", "anthropic"),
    ),
    **_in_dialects(
        "pydantic-ai",
        _program("pydantic_ai_agent.py", overflow="ModelContextWindowExceeded"),
        *DIALECTS,
    ),
    **_in_dialects(
        "langchain", _program("langchain_agent.py", overflow="ContextOverflowError"), *DIALECTS
    ),
    "langchain-js-chat": _program("langchain_agent.mjs", "chat"),
    "langchain-js-responses": _program("langchain_agent.mjs", "responses"),
    "inspect-ai-chat": _program(
        "inspect_ai_agent.py", "chat", environment="python", overflow="model_length"
    ),
    "inspect-ai-responses": _program(
        *("inspect_ai_agent.py", "responses"),
        environment="python",
        ignored=frozenset({"include", "reasoning.effort", "reasoning.summary"}),
        rows=2,  # it tries first what the model can do
        rows_with_two_calls=2,
        overflow="model_length",
    ),
    "inspect-ai-messages": _program(
        *("inspect_ai_agent.py", "messages"),
        environment="python",
        ignored=frozenset({"cache_control", "tools[].cache_control"}),
        overflow="model_length",
    ),
    "instructor": _program(
        "instructor_responses.py",
        environment="python",
        rows=3,  # it puts what was wrong with a call in the place of the call
        rows_with_two_calls=3,
        says=(call("Count", times=1), call("Count", times=2), call("Count", times=3)),
    ),
    "llama-index": _program("llama_index_agent.py", environment="llama-index"),
    **{
        f"smolagents-{way}": _program(
            *("smolagents_agent.py", way),
            rows=3,  # it hands its calls back as text
            rows_with_two_calls=3,
            says=(_RUN, _RUN, call("final_answer", answer="DONE")),
        )
        for way in ("whole", "stream")
    },
    "smolagents-code": _program(
        *("smolagents_agent.py", "code"),
        rows=3,
        rows_with_two_calls=0,
        says=(_CODE, _CODE, '<code>\nfinal_answer("DONE")\n</code>'),
        knows_task_by="New task:",
    ),
    "dspy": _program(
        "dspy_agent.py",
        rows=3,  # each turn is a question of its own, which tells what was done
        rows_with_two_calls=0,
        says=(_STEP, _STEP, _say_fields(reasoning="It was run.", answer="DONE")),
        overflow="ContextWindowExceeded",
        knows_task_by="[[ ##",
    ),
    "dspy-tools": _program(
        "dspy_tools.py",
        rows=3,
        rows_with_two_calls=3,
        says=(_RUN, _RUN, _say_fields(thought="DONE")),
    ),
}


def get_ignored_counts(stage: GymStage) -> dict[str, float]:
    """Count the ignored values of each parameter so far."""
    text = httpx.get(f"{stage.proxy.url}/metrics", timeout=60).text
    samples = re.findall(r'_ignored_parameters_total\{parameter="(.+)",route=.*\} (.+)', text)
    counts: dict[str, float] = {}
    for name, value in samples:
        counts[name] = counts.get(name, 0.0) + float(value)
    return counts


ARGUMENTS = {
    "plain": ("--context-length", "200000"),
    "two calls": ("--context-length", "200000", "--reasoning-parser", "qwen3"),
    "short context": ("--context-length", TOO_SHORT_A_CONTEXT),
}


GetStage = Callable[[str], GymStage]
"""A proxy by the name of its arguments: SGLang's parsers take long to start."""


@pytest.fixture(scope="module")
def get_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetStage]:
    made: dict[str, GymStage] = {}

    def get(name: str) -> GymStage:
        if name not in made:
            folder = tmp_path_factory.mktemp("stage")
            made[name] = GymStage(folder, arguments=ARGUMENTS[name], incremental=True)
        return made[name]

    yield get
    for stage in made.values():
        stage.close()


class Scene:
    def __init__(self, program: FrameworkProgram, stage: GymStage, replies: list[str]) -> None:
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn of the task."""
        self.delays: list[dict[str, Any]] = []
        """Delays of the first turns; the others come at once."""
        self._program, self._stage, self._replies = program, stage, replies
        self._ignored_before = get_ignored_counts(stage)
        stage.server.script = self._script
        self._session_id, self._key = stage.proxy.open_session()

    def _script(self, request: dict[str, Any]) -> Script:
        prompt = self.text_of(request["input_ids"])
        if self._program.knows_task_by not in prompt or TASK not in prompt:  # no turn of the task
            return Script("Seventeen.")
        text = self._replies[min(len(self.turns), len(self._replies) - 1)]
        reply = self._stage.tokenizer.encode(f"{text}<|im_end|>").ids
        delay = self.delays[len(self.turns)] if len(self.turns) < len(self.delays) else {}
        self.turns.append((request["input_ids"], reply))
        return Script(text, **{"piece_tokens": 8, **delay})

    def text_of(self, ids: list[int]) -> str:
        return self._stage.tokenizer.decode(ids, skip_special_tokens=False)

    def play(self, folder: Path) -> tuple[int, str, str]:
        """Return exit status and output of the program, and a report for a failure."""
        proxy = self._stage.proxy
        done = self._program.run(proxy.url, self._key, folder / "home")
        outputs = (done.stdout[-3000:], done.stderr[-3000:], proxy.log.read_text()[-3000:])
        return done.returncode, done.stdout + done.stderr, "\n".join(outputs)

    def ignored(self) -> set[str]:
        counts = get_ignored_counts(self._stage)
        return {name for name, count in counts.items() if count > self._ignored_before.get(name, 0)}

    def rows(self) -> list[dict[str, list[int]]]:
        proxy = self._stage.proxy
        for route in ("/rl/set_reward", "/rl/end_session"):
            assert proxy.post(route, {"reward": 1.0}, self._key).status_code == 200
        body = {"session_id": self._session_id, "style": "concat"}
        exported = proxy.post("/export_trajectories", body).json()["interactions"]
        tensors = [row["tensor_dict"] for row in exported.values()]
        return [{name: values[0] for name, values in tensor.items()} for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "with_two_calls"),
    [
        *((name, False) for name in FRAMEWORKS),
        *((name, True) for name, program in FRAMEWORKS.items() if program.rows_with_two_calls),
    ],
)
def test_the_turns_of_a_program_are_recorded_token_by_token(
    name: str, with_two_calls: bool, get_stage: GetStage, tmp_path: Path
) -> None:
    program = FRAMEWORKS[name]
    stage = get_stage("two calls" if with_two_calls else "plain")
    scene = Scene(program, stage, program.get_replies(with_two_calls))
    code, output, report = scene.play(tmp_path)
    assert (code, len(scene.turns)) == (0, len(program.says)), report
    assert "DONE" in output, report
    heard = [scene.text_of(prompt).count("seventeen") for prompt, _ in scene.turns]
    assert heard == sorted(heard)
    assert heard[-1] - heard[0] >= (4 if with_two_calls else 2), "what was run was told"
    assert scene.ignored() == program.ignored
    rows = scene.rows()
    assert len(rows) == (program.rows_with_two_calls if with_two_calls else program.rows)
    for prompt, reply in scene.turns:
        end = len(prompt) + len(reply)
        (row,) = (row for row in rows if row["input_ids"][:end] == prompt + reply)
        assert row["loss_mask"][len(prompt) - 1 : end] == [0] + [1] * len(reply)


@pytest.mark.parametrize("name", [name for name, program in FRAMEWORKS.items() if program.overflow])
def test_a_program_knows_a_prompt_that_is_too_long(
    name: str, get_stage: GetStage, tmp_path: Path
) -> None:
    program = FRAMEWORKS[name]
    scene = Scene(program, get_stage("short context"), program.get_replies(False))
    _, output, report = scene.play(tmp_path)
    assert program.overflow in output, report
    assert scene.turns == []


@pytest.mark.parametrize(
    "name",
    [
        *("openai-node-responses", "vercel-ai-default-stream"),
        *("pydantic-ai-responses-stream", "langchain-responses-stream"),
    ],
)
def test_a_program_waits_through_silences_of_a_response(
    name: str, get_stage: GetStage, tmp_path: Path
) -> None:
    program = FRAMEWORKS[name]
    scene = Scene(program, get_stage("plain"), program.get_replies(False))
    scene.delays = [
        {"delay_s": SILENCE_S},  # the stream has not begun
        {"piece_tokens": 60, "piece_delay_s": SILENCE_S},  # a call is being said
    ]
    code, output, report = scene.play(tmp_path)
    assert (code, len(scene.turns)) == (0, len(program.says)), report
    assert "DONE" in output, report
