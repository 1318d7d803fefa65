"""Table of coding harnesses, read from `harnesses.yaml`, and their installation."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

import msgspec
import yaml

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.recipe.recipe import Recipe
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
"""Common variables that switch off statistics, updates and colors."""


class TerminalUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Way in which a person opens a harness at a terminal, with their own settings."""

    command: tuple[str, ...]
    variables: dict[str, str] = {}
    files: dict[str, str] = {}


class HarnessProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Released coding harness; the comment at the top of `harnesses.yaml` explains the fields."""

    package: str
    version: str
    dialect: Literal["chat", "responses", "messages", "google"]
    command: tuple[str, ...]
    registry: Literal["npm", "PyPI"] = "npm"
    variables: dict[str, str] = {}
    files: dict[str, str] = {}
    python_version: str = ""
    note: str = ""
    terminal: TerminalUse | None = None


@dataclass(frozen=True, slots=True)
class HarnessTemplateValues:
    """Values of an episode for a harness's settings."""

    root_url: str
    api_key: str
    home: str
    installation_dir: str
    context_tokens: int

    def fill(self, text: str) -> str:
        """Fill the placeholders in a text of the table."""
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
    if harness_name not in HARNESSES:
        suggestion = format_name_suggestion(harness_name, HARNESSES)
        raise RecipeError(
            f"there is no harness {harness_name!r}{suggestion}",
            key=key,
            hint=f"choose from {', '.join(HARNESSES)}",
        )
    return HARNESSES[harness_name]


CHECKOUT = Path(__file__).resolve().parents[3]
HARNESSES_DIR = CHECKOUT / ".venvs" / "harnesses"
"""Default folder of installed harnesses, which has one folder for each."""
PACKAGE_LOCKS_DIR = CHECKOUT / "requirements" / "harnesses"
STAMP_FILE_NAME = ".installed"
"""File in an installed harness's folder with the digest of its lock, written last."""
INSTALL_TIMEOUT_S = 1800.0
MAX_QUOTED_OUTPUT_CHARS = 2000
"""Length of an installer's output that an error quotes, from its end."""
HARNESS_WORKFLOW = "areal_hpc.agents.harness.harness_agent.HarnessAgent"


def list_recipe_harnesses(recipe: Recipe) -> list[tuple[str, Path]]:
    """List the harnesses that a recipe's agents run, and the folders that must hold them."""
    harnesses: dict[tuple[str, Path], None] = {}
    for workflow, kwargs in recipe.agents:
        if workflow == HARNESS_WORKFLOW and kwargs.get("harness"):
            folder = Path(kwargs.get("harnesses_dir", HARNESSES_DIR)).absolute()
            harnesses[str(kwargs["harness"]), folder] = None
    return list(harnesses)


def get_program_path(program: HarnessProgram, folder: Path) -> Path:
    """Return the path of a harness's program, which is the first word of its command."""
    return Path(program.command[0].replace("$FOLDER", str(folder)))


def find_installed_harness(harness_name: str, harnesses_dir: Path, key: str) -> Path:
    """Return the folder of an installed harness, or raise RecipeError."""
    folder = harnesses_dir / harness_name
    program = get_program_path(get_harness_program(harness_name, key), folder)
    if not (os.access(program, os.X_OK) and (folder / STAMP_FILE_NAME).exists()):
        raise RecipeError(
            f"the harness {harness_name} is not installed, or not completely: "
            f"expected the program {program} and the file {folder / STAMP_FILE_NAME}",
            key=key,
            hint=f"areal-hpc install-harness {harness_name} --dir {harnesses_dir}",
        )
    return folder


def install_harness(harness_name: str, harnesses_dir: Path, version: str = "") -> bool:
    """Install a harness, and return False if its locked version, or `version`, is there already.

    Args:
        harness_name: Name in `harnesses.yaml`.
        harnesses_dir: Folder that holds the folders of all harnesses.
        version: Version other than the lock's, with the dependencies that the registry resolves.
    """
    program = get_harness_program(harness_name, "NAME")
    folder, stamp = harnesses_dir / harness_name, version or _compute_lock_digest(harness_name)
    if (folder / STAMP_FILE_NAME).exists() and (folder / STAMP_FILE_NAME).read_text() == stamp:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install = _install_from_npm if program.registry == "npm" else _install_from_pypi
    install(harness_name, program, folder, version)
    if not os.access(path := get_program_path(program, folder), os.X_OK):
        raise ClusterError(
            f"the packages of {harness_name} are installed, but {path} is no program"
        )
    (folder / STAMP_FILE_NAME).write_text(stamp)
    return True


def query_newest_version(harness_name: str) -> str:
    """Query a harness's registry for its newest version."""
    program = get_harness_program(harness_name, "NAME")
    if program.registry == "npm":
        return _run([_find_npm(), "view", program.package, "version"], Path.cwd()).strip()
    options = ("--python-version", program.python_version) if program.python_version else ()
    output = _run(
        [sys.executable, "-m", "pip", "index", "versions", *options, program.package], Path.cwd()
    )
    return output.split("(", 1)[1].split(")", 1)[0]  # the output begins with `name (version)`


def list_package_lock_files(harness_name: str) -> list[Path]:
    files = sorted((PACKAGE_LOCKS_DIR / harness_name).glob("*"))
    if not files:
        raise RecipeError(
            f"there is no lock {PACKAGE_LOCKS_DIR / harness_name}",
            key="NAME",
            hint="run this in a checkout of areal_hpc",
        )
    return files


def _compute_lock_digest(harness_name: str) -> str:
    digest = hashlib.sha256()
    for path in list_package_lock_files(harness_name):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install_from_npm(
    harness_name: str, program: HarnessProgram, folder: Path, version: str
) -> None:
    npm = _find_npm()
    for path in list_package_lock_files(harness_name):
        if not version or path.name == "package.json":
            shutil.copy(path, folder)
    # `npm ci` would fail at optional packages for other systems that a registry lacks.
    options = ("--no-audit", "--no-fund", "--loglevel=error")
    packages = ("--save-exact", f"{program.package}@{version}") if version else ("--no-save",)
    _run([npm, "install", *options, *packages], folder)


def _find_npm() -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise ClusterError("npm is missing", hint="install Node.js 20 or newer, which has it")
    return npm


def _install_from_pypi(
    harness_name: str, program: HarnessProgram, folder: Path, version: str
) -> None:
    needed = program.python_version
    python = _find_python(needed) if needed else sys.executable
    if python is None:
        raise ClusterError(
            f"{harness_name} needs Python {needed}, and there is none on PATH, of pyenv or of uv",
            hint=f"module load, pyenv install {needed} or uv python install {needed}",
        )
    _run([python, "-m", "venv", str(folder / "python")], folder)
    lock = (
        "--no-deps",
        "--require-hashes",
        "-r",
        str(PACKAGE_LOCKS_DIR / harness_name / "requirements.txt"),
    )
    packages = (f"{program.package}=={version}",) if version else lock
    pip = [str(folder / "python" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run([*pip, *packages], folder)


def _find_python(version: str) -> str | None:
    home = Path.home()
    candidates = [
        f"python{version}",
        *map(str, home.glob(f".pyenv/versions/{version}*/bin/python{version}")),
        *map(str, home.glob(f".local/share/uv/python/cpython-{version}*/bin/python{version}")),
    ]
    return next((python for python in candidates if _is_usable(python)), None)


def _is_usable(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{' '.join(command[:3])} took more than {INSTALL_TIMEOUT_S} s",
            hint="run this where the registry can be reached",
        ) from error
    if ended.returncode != 0:
        output = " ".join((ended.stderr.strip() or ended.stdout).split())[-MAX_QUOTED_OUTPUT_CHARS:]
        raise ClusterError(
            f"{' '.join(command[:3])} ended with {ended.returncode}: {output}",
            hint="run this where the registry can be reached; if a package's hash differs from the "
            "lock's, the registry has another file: install nothing from there",
        )
    return ended.stdout
