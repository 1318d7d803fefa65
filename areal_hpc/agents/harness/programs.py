"""Coding harnesses by name: where each comes from, how it is started, and how it finds its model.

In arguments, variables and files `$ROOT_URL` is the session's address, `$BASE_URL` the same with
`/v1`, `$API_KEY` its key, `$HOME` the program's home, `$FOLDER` where it is installed, and
`$CONTEXT_TOKENS` the length of the model's context; in arguments `{task}` is the task's text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Literal

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.user_functions import format_name_suggestion

Dialect = Literal["chat", "responses", "messages", "google"]
Registry = Literal["npm", "PyPI"]
QUIET_VARIABLES = {
    "LANG": "C.UTF-8",
    "NO_COLOR": "1",
    "CI": "1",
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "NO_UPDATE_NOTIFIER": "1",
}
"""Statistics, updates and colors are switched off, by the names that most programs know."""


@dataclass(frozen=True, slots=True)
class HarnessProgram:
    """A coding harness as its makers release it."""

    package: str
    """Its name in the registry."""
    version: str
    """The one that the lock pins, and that is tested."""
    dialect: Dialect
    command: tuple[str, ...]
    registry: Registry = "npm"
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of its settings, by their paths in its home."""
    python_version: str = ""
    """Version of Python that it needs, such as 3.12; empty: any that this project runs on."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class HarnessTemplateValues:
    """What a program is told of its episode."""

    root_url: str
    api_key: str
    home: str
    installation_dir: str
    context_tokens: int

    def fill(self, text: str) -> str:
        """A text of the table with the values of this episode."""
        return Template(text).safe_substitute(
            ROOT_URL=self.root_url,
            BASE_URL=f"{self.root_url}/v1",
            API_KEY=self.api_key,
            HOME=self.home,
            FOLDER=self.installation_dir,
            CONTEXT_TOKENS=str(self.context_tokens),
        )


def _format_settings_json(content: object) -> str:
    return json.dumps(content, indent=1).replace('"$CONTEXT_TOKENS"', "$CONTEXT_TOKENS")


_NPM_BIN_DIR = "$FOLDER/node_modules/.bin"
_NODE_PROGRAM = "$FOLDER/node_modules/node/bin/node"
"""Of the package `node`, for programs that need a newer one than many machines have."""
_PYTHON_BIN_DIR = "$FOLDER/python/bin"
_CODEX_SETTINGS = """openai_base_url = "$BASE_URL"
model = "default"
model_context_window = $CONTEXT_TOKENS
check_for_update_on_startup = false
[analytics]
enabled = false
"""
_QUIET_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}
_GEMINI_SETTINGS = {"security": {"auth": {"selectedType": "gemini-api-key"}}, **_QUIET_SETTINGS}
_PI_MODEL = {"id": "default", "contextWindow": "$CONTEXT_TOKENS", "maxTokens": 8192}
_PI_PROVIDER_SETTINGS = {
    **{"baseUrl": "$BASE_URL", "api": "openai-completions", "apiKey": "$API_KEY"},
    "models": [_PI_MODEL],
}
_OPENCODE_SETTINGS = {
    "model": "session/default",
    "small_model": "session/default",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "session": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$BASE_URL", "apiKey": "$API_KEY"},
            "models": {
                "default": {"limit": {"context": "$CONTEXT_TOKENS", "output": 8192}},
            },
        }
    },
}
_CLINE_SETTINGS = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "modes": {},
    "providers": {
        "openai-compatible": {
            "settings": {
                "provider": "openai-compatible",
                "apiKey": "$API_KEY",
                "model": "default",
                "baseUrl": "$BASE_URL",
            },
            "updatedAt": "2026-01-01T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
_KIMI_SETTINGS = """default_model = "default"
[providers.session]
type = "openai"
base_url = "$BASE_URL"
api_key = "$API_KEY"
[models.default]
provider = "session"
model = "default"
max_context_size = $CONTEXT_TOKENS
"""
_CONTINUE_SETTINGS = """name: session
version: 1.0.0
schema: v1
models:
  - name: default
    provider: openai
    model: default
    apiBase: $BASE_URL
    apiKey: $API_KEY
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: $CONTEXT_TOKENS}
"""
_VIBE_SETTINGS = """active_model = "default"
enable_telemetry = false
enable_update_checks = false
[[providers]]
name = "session"
api_base = "$BASE_URL"
api_key_env_var = "OPENAI_API_KEY"
backend = "generic"
[[models]]
name = "default"
alias = "default"
provider = "session"
"""

HARNESSES: Mapping[str, HarnessProgram] = {
    "claude-code": HarnessProgram(
        "@anthropic-ai/claude-code",
        "2.1.330",
        "messages",
        (
            *(
                f"{_NPM_BIN_DIR}/claude",
                "--output-format",
                "json",
                "--dangerously-skip-permissions",
            ),
            *("-p", "{task}"),
        ),
        variables={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "IS_SANDBOX": "1",  # else it asks root for every permission
        },
    ),
    "codex": HarnessProgram(
        "@openai/codex",
        "0.169.0",
        "responses",
        (
            *(f"{_NPM_BIN_DIR}/codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "{task}"),
        ),
        variables={"CODEX_API_KEY": "$API_KEY"},
        files={".codex/config.toml": _CODEX_SETTINGS},
    ),
    "gemini-cli": HarnessProgram(
        "@google/gemini-cli",
        "0.61.0",
        "google",
        (
            f"{_NPM_BIN_DIR}/gemini",
            "--skip-trust",
            "--yolo",
            "--model",
            "gemini-2.5-pro",
            "-p",
            "{task}",
        ),
        variables={"GOOGLE_GEMINI_BASE_URL": "$ROOT_URL", "GEMINI_API_KEY": "$API_KEY"},
        files={".gemini/settings.json": _format_settings_json(_GEMINI_SETTINGS)},
        note="its thoughts are not sent back to the model",
    ),
    "qwen-code": HarnessProgram(
        "@qwen-code/qwen-code",
        "0.24.4",
        "chat",
        (
            f"{_NPM_BIN_DIR}/qwen",
            "--yolo",
            "--auth-type",
            "openai",
            "--model",
            "default",
            "-p",
            "{task}",
        ),
        files={".qwen/settings.json": _format_settings_json(_QUIET_SETTINGS)},
    ),
    "opencode": HarnessProgram(
        "opencode-ai",
        "1.18.33",
        "chat",
        (f"{_NPM_BIN_DIR}/opencode", "run", "{task}"),
        variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": _format_settings_json(_OPENCODE_SETTINGS)},
    ),
    "pi": HarnessProgram(
        "@earendil-works/pi-coding-agent",
        "0.87.1",
        "chat",
        (
            _NODE_PROGRAM,
            f"{_NPM_BIN_DIR}/pi",
            "--provider",
            "session",
            "--model",
            "default",
            "-p",
            "{task}",
        ),
        variables={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={
            ".pi/agent/models.json": _format_settings_json(
                {"providers": {"session": _PI_PROVIDER_SETTINGS}}
            )
        },
        note="needs Node.js 22, which is installed with it",
    ),
    "mini-swe-agent": HarnessProgram(
        "mini-swe-agent",
        "2.4.6",
        "chat",
        (
            *(f"{_PYTHON_BIN_DIR}/mini", "-y", "--exit-immediately", "-m", "openai/default"),
            *("-t", "{task}"),
        ),
        registry="PyPI",
        variables={
            "OPENAI_API_BASE": "$BASE_URL",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    "openhands": HarnessProgram(
        "openhands",
        "1.16.0",
        "chat",
        (
            *(f"{_PYTHON_BIN_DIR}/openhands", "--headless", "--override-with-envs", "--json"),
            *("-t", "{task}"),
        ),
        registry="PyPI",
        variables={
            "LLM_BASE_URL": "$BASE_URL",
            "LLM_API_KEY": "$API_KEY",
            "LLM_MODEL": "openai/default",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        python_version="3.12",
        note="takes ten seconds to start",
    ),
    "cline": HarnessProgram(
        "cline",
        "3.0.65",
        "chat",
        (f"{_NPM_BIN_DIR}/cline", "--json", "-P", "openai-compatible", "-m", "default", "{task}"),
        files={".cline/data/settings/providers.json": _format_settings_json(_CLINE_SETTINGS)},
        note="leaves a daemon behind, which ends with the episode",
    ),
    "kimi": HarnessProgram(
        "@moonshot-ai/kimi-code",
        "2.1.0",
        "chat",
        (
            *(_NODE_PROGRAM, f"{_NPM_BIN_DIR}/kimi", "--output-format", "stream-json"),
            *("-p", "{task}"),
        ),
        files={".kimi-code/config.toml": _KIMI_SETTINGS},
        note="needs Node.js 22, which is installed with it",
    ),
    "continue": HarnessProgram(
        "@continuedev/cli",
        "1.5.47",
        "chat",
        (f"{_NPM_BIN_DIR}/cn", "--auto", "--config", "$HOME/.continue/config.yaml", "-p", "{task}"),
        variables={"CONTINUE_TELEMETRY_ENABLED": "0"},
        files={".continue/config.yaml": _CONTINUE_SETTINGS},
    ),
    "mistral-vibe": HarnessProgram(
        "mistral-vibe",
        "3.0.2",
        "chat",
        (f"{_PYTHON_BIN_DIR}/vibe", "--auto-approve", "--output", "json", "-p", "{task}"),
        registry="PyPI",
        files={".vibe/config.toml": _VIBE_SETTINGS},
        python_version="3.12",
    ),
    "copilot": HarnessProgram(
        "@github/copilot",
        "1.0.102",
        "chat",
        (f"{_NPM_BIN_DIR}/copilot", "--allow-all-tools", "-p", "{task}"),
        variables={
            "COPILOT_PROVIDER_BASE_URL": "$BASE_URL",
            "COPILOT_PROVIDER_API_KEY": "$API_KEY",
            "COPILOT_MODEL": "default",
            "COPILOT_OFFLINE": "true",
        },
    ),
}
"""By the names that other training systems use for them too."""


def get_harness_program(harness_name: str, key: str) -> HarnessProgram:
    """The harness of a name."""
    if harness_name not in HARNESSES:
        suggestion = format_name_suggestion(harness_name, HARNESSES)
        raise RecipeError(
            f"there is no harness {harness_name!r}{suggestion}",
            key=key,
            hint=f"choose from {', '.join(HARNESSES)}",
        )
    return HARNESSES[harness_name]
