"""Real coding agents: how each is pointed at a proxy, what its model says, what the proxy ignores.

`scripts/setup_harnesses.sh` installs them.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.environments import CHECKOUT

INSTALLED = CHECKOUT / ".venvs" / "harnesses"
NPM, PYTHON = INSTALLED / "node_modules", INSTALLED / "python" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "harness_programs"
TASK = "Run a command that prints seventeen. Then run it again. Then say DONE."
COMMAND = "echo seventeen"
PATIENCE_S = 300.0

ENVIRONMENT = {
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "PI_OFFLINE": "1",
    "PI_TELEMETRY": "0",
    # What asks for the rest of the world all the same finds nobody.
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}
"""Nothing leaves the machine: statistics, updates and lists of models are switched off."""


def call(tool: str, **arguments: object) -> str:
    """A tool call as Qwen2.5 says it."""
    said = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


_CODEX = """openai_base_url = "$URL/v1"
model = "tiny"
check_for_update_on_startup = false
[analytics]
enabled = false
"""
_PI = {
    **{"baseUrl": "$URL/v1", "api": "openai-completions", "apiKey": "$KEY"},
    "models": [{"id": "tiny", "contextWindow": 262144, "maxTokens": 4096}],
}
_GEMINI = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}
_QWEN = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}


@dataclass(frozen=True)
class Harness:
    """A program that solves `TASK` in three turns."""

    argv: tuple[str, ...]
    """The task comes after it."""
    says: tuple[str, str, str]
    """What the model says, turn by turn."""
    ignored: frozenset[str]
    """Parameters that it sends and the proxy ignores."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Those that it reads in its home; `$URL` and `$KEY` are the proxy's."""
    rows: int = 1
    """In the export."""
    overflow: str = ""
    """What it prints when it knows a prompt to be too long for the model."""

    def run(self, url: str, key: str, home: Path) -> subprocess.CompletedProcess[str]:
        """Let it solve the task, against a proxy and nothing else."""
        workplace = home / "work"
        workplace.mkdir(parents=True)
        for name, text in self.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text.replace("$URL", url).replace("$KEY", key))
        environment = {
            **ENVIRONMENT,
            **{"PATH": os.environ["PATH"], "HOME": str(home)},
            **{"ANTHROPIC_BASE_URL": url, "OPENAI_BASE_URL": f"{url}/v1"},
            **{"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": key},
            **dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CODEX_API_KEY"), key),
        }
        return subprocess.run(
            [*self.argv, TASK],
            cwd=workplace,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


def _claude(version: str, *more_ignored: str) -> Harness:
    said = call("Bash", command=COMMAND, description="Print seventeen")
    ignored = ("context_management", "metadata", "output_config.effort", "thinking", *more_ignored)
    return Harness(
        (
            str(NPM / f"claude-code-{version}" / "bin" / "claude.exe"),
            *("--output-format", "json", "--allowedTools", "Bash", "-p"),
        ),
        (said, said, "DONE"),
        frozenset(ignored),
        overflow='"terminal_reason":"prompt_too_long"',
    )


_EXEC = call("exec_command", cmd=COMMAND)
_BASH = call("bash", command=COMMAND)
_SHELL = call("run_shell_command", command=COMMAND, description="Print it", is_background=False)
_RUN = call("run_command", command=COMMAND)

HARNESSES = {
    "claude-code-2.1.197": _claude("2.1.197"),
    "claude-code-2.1.330": _claude("2.1.330", "tools[].defer_loading"),
    "codex-0.169.0": Harness(
        (
            *(str(NPM / ".bin" / "codex"), "exec", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
        ),
        (_EXEC, _EXEC, "DONE"),
        frozenset(
            {
                *("client_metadata", "include", "prompt_cache_key", "reasoning.summary"),
                "tools[web_search]",
            }
        ),
        files={".codex/config.toml": _CODEX},
        overflow="ran out of room in the model's context window",
    ),
    "pi-0.73.1": Harness(
        (str(NPM / ".bin" / "pi"), "--provider", "local", "--model", "tiny", "-p"),
        (_BASH, _BASH, "DONE"),
        frozenset({"store"}),
        files={".pi/agent/models.json": json.dumps({"providers": {"local": _PI}})},
    ),
    "qwen-code-0.24.4": Harness(
        (str(NPM / ".bin" / "qwen"), "--yolo", "--auth-type", "anthropic", "--model", "tiny", "-p"),
        (_SHELL, _SHELL, "DONE"),
        frozenset({"thinking", "tools[].cache_control"}),
        files={".qwen/settings.json": json.dumps(_QWEN)},
    ),
    "gemini-cli-0.61.0": Harness(
        (str(NPM / ".bin" / "gemini"), "--skip-trust", "--yolo", "--model", "gemini-2.5-pro", "-p"),
        (_SHELL, _SHELL, "DONE"),
        frozenset({"generationConfig.thinkingConfig.thinkingBudget"}),
        files={".gemini/settings.json": json.dumps(_GEMINI)},
    ),
    "inspect-ai-0.3.285": Harness(
        (str(PYTHON), str(PROGRAMS / "inspect_ai_responses.py")),
        (_RUN, _RUN, "DONE"),
        frozenset({"include", "reasoning.effort", "reasoning.summary"}),
        rows=2,  # it tries first what the model can do
        overflow="model_length",
    ),
    "instructor-1.17.0": Harness(
        (str(PYTHON), str(PROGRAMS / "instructor_responses.py")),
        (call("Count", times=1), call("Count", times=2), call("Count", times=3)),
        frozenset(),
        rows=3,  # it puts what was wrong with a call in the place of the call
    ),
}
