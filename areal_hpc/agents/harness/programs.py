"""Coding harnesses by name, as `harnesses.yaml` has them."""

from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

import msgspec
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.user_functions import format_name_suggestion

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


class HarnessProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A coding harness as its makers release it; the head of the file explains the fields."""

    package: str
    version: str
    dialect: Literal["chat", "responses", "messages", "google"]
    command: tuple[str, ...]
    registry: Literal["npm", "PyPI"] = "npm"
    variables: dict[str, str] = {}
    files: dict[str, str] = {}
    python_version: str = ""
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


HARNESSES: dict[str, HarnessProgram] = msgspec.convert(
    yaml.safe_load(Path(__file__).with_name("harnesses.yaml").read_text()),
    dict[str, HarnessProgram],
)


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
