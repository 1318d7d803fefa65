"""Play agents before the real SGLang through a proxy, each framework in its own environment."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_hpc.proxy.sessions.store import Session, SessionStore, decode_event
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import Interaction, unpack_ids
from areal_hpc.shards.journal import read_journal
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.environments import CHECKOUT, python_of
from tests.support.prompt_audit import prompt_ids
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import CELL
from tests.support.waiting import wait_for

FOLDER = Path(__file__).parent
TASK = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "answer": ""}
"""Every answer is right: the model says anything."""
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}
"""A random model would not call a tool by itself; a grammar makes it."""
INDIVIDUAL = msgspec.structs.asdict(ExportSettings(style="individual"))


@dataclass(frozen=True)
class Scene:
    """Texts that the agent received in one play, and the proxy's record of it."""

    heard: list[str]
    """Texts that the agent took for the model's last words."""
    session: Session
    encoder: TokenEncoder

    @property
    def turns(self) -> list[Interaction]:
        return list(self.session.tree)

    @property
    def rows(self) -> list[TrajectoryRow]:
        ref = self.session.request.ref
        assert ref is not None
        return self.session.build_rows(ref, "cell-0")

    @property
    def rewards(self) -> list[float]:
        return [round(row.reward, 6) for row in self.rows]

    def trained(self, row: TrajectoryRow) -> int:
        return int(np.sum(row.loss_mask_T))

    def said(self, turn: Interaction, *, skip_special_tokens: bool = False) -> str:
        text = self.encoder.decode(
            unpack_ids(turn.output_ids).tolist(), skip_special_tokens=skip_special_tokens
        )
        return text.removesuffix("<|im_end|>") if turn.closed else text

    def prompt(self, turn: Interaction) -> str:
        return self.encoder.decode(prompt_ids(self.session.tree, turn))


class Player:
    """Process in an environment, which imports the packages there once for all orders."""

    def __init__(self, environment: str, folder: Path) -> None:
        self._reports = folder / f"play_{environment}"
        self._log = self._reports.with_suffix(".log")
        self._orders = 0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python_of(environment), FOLDER / "play.py", self._reports],
                cwd=CHECKOUT,
                env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{FOLDER}"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def report(self, order: dict[str, Any]) -> Any:
        report = self._reports.with_suffix(f".{self._orders}")
        self._orders += 1
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

        def is_done() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            return report.exists()

        wait_for(is_done, 110, self._log.read_text)
        return msgspec.json.decode(report.read_bytes())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Theatre:
    """Runner of agents before the real model."""

    def __init__(self, stage: Stage, url: str) -> None:
        self.stage = stage
        self.url = url
        self.encoder = TokenEncoder.from_model_dir(stage.model_dir)
        self._tickets = 0
        self._players: dict[str, Player] = {}

    def play(self, environment: str, *episodes: dict[str, Any]) -> list[Scene]:
        """Run episodes (`play.Episode`) side by side in an environment."""
        orders = []
        for episode in episodes:
            self._tickets += 1
            orders.append({"ticket_id": self._tickets, "data": TASK, **episode})
        paths = self.stage.paths
        if environment not in self._players:
            self._players[environment] = Player(environment, paths.root)
        place = {"run_dir": str(paths.root), "cell": CELL, "service_key": self.stage.service_key}
        played = self._players[environment].report({**place, "episodes": orders})
        for play in played:
            assert play["status"] == "ok", play["reason"]
        book = self._book()
        return [
            Scene(play["heard"], book.sessions[play["session_id"]], self.encoder) for play in played
        ]

    def close(self) -> None:
        for player in self._players.values():
            player.close()

    def _book(self) -> SessionStore:
        """Read the proxy's journal up to now."""
        (journal,) = self.stage.journal_dir.glob("*/journal")
        book = SessionStore()
        for record in read_journal(journal):
            book.apply(decode_event(record.payload))
        return book


def assert_a_tool_was_used(scene: Scene) -> None:
    """Assert one call of `add`, its result and an answer, recorded exactly and trained once."""
    call, answer = scene.turns
    (tool_call,) = call.reply["tool_calls"]
    digits = tool_call["function"]["arguments"]
    text = scene.said(call).removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(text) == {"name": "add", "arguments": digits}
    # The framework ran the tool with the model's arguments and returned the result to the model.
    result = next(message for message in answer.new_messages if message["role"] == "tool")
    assert result["content"] == str(digits["x"] + digits["y"])
    assert (answer.parent_id, answer.reuse) == (call.interaction_id, "reused")
    assert scene.prompt(answer).startswith(scene.prompt(call) + scene.said(call))
    assert scene.heard == [scene.said(answer)]
    (row,) = scene.rows
    assert row.reward == 1.0
    assert scene.trained(row) == call.num_output_tokens + answer.num_output_tokens
