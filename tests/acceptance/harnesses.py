"""What the model says to each harness, so that it solves one task: read, run, edit, done."""

import json
from collections.abc import Callable
from typing import Any

TASK = "Read greeting.py, run it, make it say good evening in place of good morning. Then say DONE."
OLD, NEW = "morning", "evening"
RUN = "python3 greeting.py"
_SED = f"sed -i s/{OLD}/{NEW}/ greeting.py"
Conversation = Callable[[str], list[str]]
"""Replies by the folder that the program works in."""


def call(tool: str, **arguments: Any) -> str:
    """A tool call as the tiny model's template writes it."""
    said = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


def _by_commands(tool: str, name: str = "command", **more: Any) -> Conversation:
    """A harness that is given commands alone."""
    commands = ("cat greeting.py", RUN, _SED)
    return lambda work: [*(call(tool, **{name: one}, **more) for one in commands), "DONE"]


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


def build_replies(name: str, work: str) -> list[str]:
    """What the model says, turn by turn."""
    return CONVERSATIONS[name](work)
