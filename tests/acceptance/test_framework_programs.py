"""Programs of Python frameworks against `areal-hpc proxy`: three turns, recorded token by token.

The model is scripted, SGLang's parsers are real, and nothing of the frameworks is changed.
`scripts/setup_harnesses.sh` installs them.
"""

import json
import os
import re
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
TOO_SHORT_A_CONTEXT = "300"

INSTALLED = CHECKOUT / ".venvs" / "harnesses" / "python" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "harness_programs"
TASK = "Run a command that prints seventeen. Then run it again. Then say DONE."
COMMAND = "echo seventeen"
PATIENCE_S = 300.0


def call(tool: str, **arguments: object) -> str:
    """A tool call as Qwen2.5 says it."""
    said = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


@dataclass(frozen=True)
class FrameworkProgram:
    """A program that solves `TASK` in three turns."""

    script: str
    says: tuple[str, str, str]
    """What the model says, turn by turn."""
    ignored: frozenset[str]
    """Parameters that it sends and the proxy ignores."""
    rows: int
    """In the export."""
    overflow: str = ""
    """What it prints when it knows a prompt to be too long for the model."""

    def run(self, url: str, key: str, home: Path) -> subprocess.CompletedProcess[str]:
        """Let it solve the task, against a proxy and nothing else."""
        workplace = home / "work"
        workplace.mkdir(parents=True)
        environment = {
            **{"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
            **{"DO_NOT_TRACK": "1", "TERM": "dumb"},
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key},
            # What asks for the rest of the world all the same finds nobody.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return subprocess.run(
            [str(INSTALLED), str(PROGRAMS / self.script), TASK],
            cwd=workplace,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


_RUN = call("run_command", command=COMMAND)
FRAMEWORKS = {
    "inspect-ai-0.3.285": FrameworkProgram(
        "inspect_ai_responses.py",
        (_RUN, _RUN, "DONE"),
        frozenset({"include", "reasoning.effort", "reasoning.summary"}),
        rows=2,  # it tries first what the model can do
        overflow="model_length",
    ),
    "instructor-1.17.0": FrameworkProgram(
        "instructor_responses.py",
        (call("Count", times=1), call("Count", times=2), call("Count", times=3)),
        frozenset(),
        rows=3,  # it puts what was wrong with a call in the place of the call
    ),
}


class Scene:
    """A program, its proxy and its model."""

    def __init__(self, program: FrameworkProgram, folder: Path, context_tokens: str) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn of the task."""
        self._program = program
        self._folder = folder
        self._loop = LoopThread()
        self._server = ScriptedSGLang(self.tokenizer, self._script, incremental=True)
        self._loop.run(self._server.start())
        arguments = ("--tool-call-parser", "qwen25", "--context-length", context_tokens)
        self.proxy = LoneProxy(folder, self._server.url, arguments=arguments)
        self.session_id, self.key = self.proxy.open_session()

    def _script(self, request: dict[str, Any]) -> Script:
        prompt = self.text_of(request["input_ids"])
        if WITH_TOOLS not in prompt or TASK not in prompt:  # no turn of the task
            return Script("Seventeen.")
        said = self._program.says[min(len(self.turns), 2)]
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


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_three_turns_of_a_program_are_recorded_token_by_token(name: str, tmp_path: Path) -> None:
    program = FRAMEWORKS[name]
    with closing(Scene(program, tmp_path, "200000")) as scene:
        code, output, told = scene.play()
        assert (code, len(scene.turns)) == (0, 3), told
        assert "DONE" in output, told
        heard = [scene.text_of(prompt).count("seventeen") for prompt, _ in scene.turns]
        assert heard[0] < heard[1] < heard[2]
        assert scene.ignored() == program.ignored
        rows = scene.rows()
    assert len(rows) == program.rows
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
