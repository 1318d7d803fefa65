"""Real coding agents against `areal-hpc proxy`: three turns each, all recorded token by token.

The model is scripted, SGLang's parsers are real, and nothing of the agents is changed.
"""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.harnesses import HARNESSES, TASK, Harness
from tests.support.chatml import byte_level_tokenizer
from tests.support.lone_proxy import LoneProxy
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang

pytestmark = pytest.mark.timeout(400)
WITH_TOOLS = "<|im_start|>system\n# Tools\n"
TOO_SHORT_A_CONTEXT = "300"


class Scene:
    """A harness, its proxy and its model."""

    def __init__(self, harness: Harness, folder: Path, context_tokens: str) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn of the task."""
        self._harness = harness
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
        said = self._harness.says[min(len(self.turns), 2)]
        reply = self.tokenizer.encode(f"{said}<|im_end|>").ids
        self.turns.append((request["input_ids"], reply))
        return Script(said, piece_tokens=8)

    def text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def play(self) -> tuple[int, str, str]:
        """Exit status, output, and that with all else that may tell what went wrong."""
        done = self._harness.run(self.proxy.url, self.key, self._folder / "home")
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


@pytest.mark.parametrize("name", HARNESSES)
def test_three_turns_of_a_harness_are_recorded_token_by_token(name: str, tmp_path: Path) -> None:
    harness = HARNESSES[name]
    with closing(Scene(harness, tmp_path, "200000")) as scene:
        code, output, told = scene.play()
        assert (code, len(scene.turns)) == (0, 3), told
        assert "DONE" in output, told
        heard = [scene.text_of(prompt).count("seventeen") for prompt, _ in scene.turns]
        assert heard[0] < heard[1] < heard[2]
        assert scene.ignored() == harness.ignored
        rows = scene.rows()
    assert len(rows) == harness.rows
    for prompt, reply in scene.turns:
        end = len(prompt) + len(reply)
        (row,) = (row for row in rows if row["input_ids"][:end] == prompt + reply)
        assert row["loss_mask"][len(prompt) - 1 : end] == [0] + [1] * len(reply)


@pytest.mark.parametrize("name", [name for name, one in HARNESSES.items() if one.overflow])
def test_a_harness_knows_a_prompt_that_is_too_long(name: str, tmp_path: Path) -> None:
    harness = HARNESSES[name]
    with closing(Scene(harness, tmp_path, TOO_SHORT_A_CONTEXT)) as scene:
        _, output, told = scene.play()
        assert harness.overflow in output, told
        assert scene.turns == []
