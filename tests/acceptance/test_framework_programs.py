"""Programs of SDKs and agent frameworks against `areal-hpc proxy`, recorded token by token.

The model is scripted, SGLang's parsers are real, and nothing of the frameworks is changed.
`scripts/setup_harnesses.sh` installs them.
"""

import json
import os
import re
import shutil
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chatml import byte_level_tokenizer
from tests.support.environments import CHECKOUT
from tests.support.lone_proxy import LoneProxy
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang

pytestmark = pytest.mark.timeout(400)
WITH_TOOLS = "<|im_start|>system\n# Tools\n"
TOO_SHORT_A_CONTEXT = "100"

INSTALLED = CHECKOUT / ".venvs" / "harnesses"
NODE_MODULES = INSTALLED / "node" / "node_modules"
PROGRAMS = Path(__file__).parent / "harness_programs"
TASK = "Run a command that prints seventeen. Then run it again. Then say DONE."
COMMAND = "echo seventeen"
PATIENCE_S = 300.0


def call(tool: str, **arguments: object) -> str:
    """A tool call as Qwen2.5 says it."""
    said = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


_RUN = call("run_command", command=COMMAND)
THOUGHT = "<think>\nIt has to be run.\n</think>\n\nLet me see.\n"


@dataclass(frozen=True)
class FrameworkProgram:
    """A program that solves `TASK` in a few turns."""

    command: tuple[str, ...]
    """The script and its arguments before the task."""
    rows: int = 1
    """In the export: conversations that the program does not go on with make more."""
    rows_with_two_calls: int = 0
    """The same where each turn has reasoning, text and two calls; 0: it makes no such turns."""
    says: tuple[str, ...] = (_RUN, _RUN, "DONE")
    """What the model says, turn by turn."""
    ignored: frozenset[str] = frozenset()
    """Parameters that it sends and the proxy ignores."""
    overflow: str = ""
    """What it prints when it knows a prompt to be too long for the model."""
    environment: str = "python"
    """Folder of the Python that has the framework."""
    knows_task_by: str = WITH_TOOLS
    """What a prompt of the task has beside the task itself."""

    def run(self, url: str, key: str, home: Path) -> subprocess.CompletedProcess[str]:
        """Let it solve the task, against a proxy and nothing else."""
        workplace = home / "work"
        workplace.mkdir(parents=True)
        script = Path(shutil.copy(PROGRAMS / self.command[0], workplace))
        (workplace / "node_modules").symlink_to(NODE_MODULES)
        environment = {
            **{"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
            **{"DO_NOT_TRACK": "1", "TERM": "dumb", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key},
            **{"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
            # What asks for the rest of the world all the same finds nobody.
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
        """What the model says, turn by turn."""
        if not with_two_calls:
            return [*self.says]
        return [THOUGHT + (f"{one}\n{one}" if one == _RUN else one) for one in self.says]


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
FRAMEWORKS = {
    "inspect-ai": FrameworkProgram(
        ("inspect_ai_responses.py",),
        ignored=frozenset({"include", "reasoning.effort", "reasoning.summary"}),
        rows=2,  # it tries first what the model can do
        overflow="model_length",
    ),
    "instructor": FrameworkProgram(
        ("instructor_responses.py",),
        rows=3,  # it puts what was wrong with a call in the place of the call
        says=(call("Count", times=1), call("Count", times=2), call("Count", times=3)),
    ),
    "litellm-chat": FrameworkProgram(
        ("litellm_client.py", "openai"),
        rows_with_two_calls=1,
        environment="frameworks",
        overflow="ContextWindowExceeded",
    ),
    "pydantic-ai-chat": FrameworkProgram(
        ("pydantic_ai_agent.py", "chat"), rows_with_two_calls=1, environment="frameworks"
    ),
    "langchain-messages": FrameworkProgram(
        ("langchain_anthropic_agent.py",),
        rows_with_two_calls=1,
        environment="frameworks",
        overflow="ContextOverflowError",
    ),
    "dspy": FrameworkProgram(
        ("dspy_agent.py",),
        rows=3,  # each turn is a question of its own, which tells what was done
        says=(_STEP, _STEP, _say_fields(reasoning="It was run.", answer="DONE")),
        environment="frameworks",
        overflow="ContextWindowExceeded",
        knows_task_by="[[ ##",
    ),
    "openai-node": FrameworkProgram(("openai_node.mjs",)),
    "anthropic-node": FrameworkProgram(("anthropic_node.mjs",), rows_with_two_calls=1),
    "google-node": FrameworkProgram(("google_node.mjs",), rows_with_two_calls=1),
    "vercel-ai": FrameworkProgram(
        ("vercel_ai.mjs",), rows_with_two_calls=1, says=(_RUN, "Seventeen.", _RUN, "Yes.", "DONE")
    ),
}


class Scene:
    """A program, its proxy and its model."""

    def __init__(
        self,
        program: FrameworkProgram,
        folder: Path,
        context_tokens: str,
        *,
        with_two_calls: bool = False,
    ) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn of the task."""
        self._program = program
        self._folder = folder
        self._loop = LoopThread()
        self._server = ScriptedSGLang(self.tokenizer, self._script, incremental=True)
        self._loop.run(self._server.start())
        self.replies = program.get_replies(with_two_calls)
        arguments = ["--tool-call-parser", "qwen25", "--context-length", context_tokens]
        if with_two_calls:
            arguments += ["--reasoning-parser", "qwen3"]
        self.proxy = LoneProxy(folder, self._server.url, arguments=arguments)
        self.session_id, self.key = self.proxy.open_session()

    def _script(self, request: dict[str, Any]) -> Script:
        prompt = self.text_of(request["input_ids"])
        if self._program.knows_task_by not in prompt or TASK not in prompt:  # no turn of the task
            return Script("Seventeen.")
        said = self.replies[min(len(self.turns), len(self.replies) - 1)]
        reply = self.tokenizer.encode(f"{said}<|im_end|>").ids
        self.turns.append((request["input_ids"], reply))
        return Script(said, piece_tokens=8)

    def text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def play(self) -> tuple[int, str, str]:
        """Exit status, output, and that with all else that may tell what went wrong."""
        done = self._program.run(self.proxy.url, self.key, self._folder / "home")
        told = (done.stdout[-3000:], done.stderr[-3000:], self.proxy.log.read_text())
        return done.returncode, done.stdout + done.stderr, "\n".join(told)

    def ignored(self) -> set[str]:
        """The parameters that had no effect."""
        text = httpx.get(f"{self.proxy.url}/metrics", timeout=60).text
        return {*re.findall(r'_ignored_parameters_total\{parameter="(.+)",route=', text)}

    def rows(self) -> list[dict[str, list[int]]]:
        """The session's export, once it has been rewarded."""
        for route in ("/rl/set_reward", "/rl/end_session"):
            assert self.proxy.post(route, {"reward": 1.0}, self.key).status_code == 200
        asked = {"session_id": self.session_id, "style": "concat"}
        exported = self.proxy.post("/export_trajectories", asked).json()["interactions"]
        tensors = [row["tensor_dict"] for row in exported.values()]
        return [{name: values[0] for name, values in one.items()} for one in tensors]

    def close(self) -> None:
        self.proxy.kill()
        self._loop.run(self._server.stop())
        self._loop.stop()


@pytest.mark.parametrize(
    ("name", "with_two_calls"),
    [
        *((name, False) for name in FRAMEWORKS),
        *((name, True) for name, one in FRAMEWORKS.items() if one.rows_with_two_calls),
    ],
)
def test_the_turns_of_a_program_are_recorded_token_by_token(
    name: str, with_two_calls: bool, tmp_path: Path
) -> None:
    program = FRAMEWORKS[name]
    with closing(Scene(program, tmp_path, "200000", with_two_calls=with_two_calls)) as scene:
        code, output, told = scene.play()
        assert (code, len(scene.turns)) == (0, len(program.says)), told
        assert "DONE" in output, told
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


@pytest.mark.parametrize("name", [name for name, one in FRAMEWORKS.items() if one.overflow])
def test_a_program_knows_a_prompt_that_is_too_long(name: str, tmp_path: Path) -> None:
    program = FRAMEWORKS[name]
    with closing(Scene(program, tmp_path, TOO_SHORT_A_CONTEXT)) as scene:
        _, output, told = scene.play()
        assert program.overflow in output, told
        assert scene.turns == []
