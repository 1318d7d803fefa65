"""CAMEL: a ChatAgent with a tool at the proxy, and one on a client that records in its process."""

import json
import os
import subprocess
from pathlib import Path

from tests.integration.agents.theatre import Theatre, assert_a_tool_was_used
from tests.support.environments import CHECKOUT, python_of


def test_a_chat_agent_and_its_tool_are_recorded(theatre: Theatre) -> None:
    kwargs = {"tokenizer": str(theatre.stage.model_dir)}
    (scene,) = theatre.play("camel", {"workflow": "forced_camel.ForcedAgent", "kwargs": kwargs})
    assert_a_tool_was_used(scene)


def test_a_chat_agent_on_a_recording_client_exports_its_turns(theatre: Theatre) -> None:
    report = theatre.stage.paths.root / "client.json"
    subprocess.run(
        [
            python_of("camel"),
            Path(__file__).with_name("camel_client.py"),
            theatre.url,
            theatre.stage.model_dir,
            report,
        ],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        check=True,
        timeout=110,
    )
    said = json.loads(report.read_text())
    first, second = said["rows"]
    assert [first["reward"], second["reward"]] == [0.5, 1.0]
    assert [message["role"] for message in second["messages"]] == [
        *("system", "user", "assistant", "user"),
    ]
    before = [*first["input_tokens"], *first["output_tokens"]]
    assert second["input_tokens"][: len(before)] == before
    for row, heard in zip((first, second), said["heard"], strict=True):
        shown = theatre.encoder.decode(row["output_tokens"], skip_special_tokens=True)
        assert shown == heard
