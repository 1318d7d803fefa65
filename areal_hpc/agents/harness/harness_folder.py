"""Folder of a harness inside a sandbox: filled, worked in, compared and copied out."""

import asyncio
import io
import logging
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.sandbox.channel import CommandResult
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.unpacked_tree import UnpackedTree

log = logging.getLogger(__name__)

MAX_DIFF_BYTES = 4 << 20
MAX_FOLDER_BYTES, MAX_FOLDER_FILES = 256 << 20, 100_000
SCRIPT_TIMEOUT_S = 60.0
_PREPARE_SCRIPT = "git --version > /dev/null && mkdir -p harness/home harness/work"
_PREPARE_DIFF_SCRIPT = "rm -rf before before.git diff && mkdir before"
_GIT = "git --git-dir=before.git -c user.name=areal-hpc -c user.email=areal-hpc@localhost"
# One pack for all: a file for each would count towards the sandbox's limit of files.
_GIT_ADD_ARGUMENTS = "-c core.bigFileThreshold=1 add -A"
_WRITE_DIFF_SCRIPT = f"""set -e
{_GIT} --work-tree=before init -q
{_GIT} --work-tree=before {_GIT_ADD_ARGUMENTS}
{_GIT} --work-tree=before commit -q --allow-empty -m before
{_GIT} --work-tree=work {_GIT_ADD_ARGUMENTS}
{_GIT} --work-tree=work diff --cached --binary HEAD > diff"""
_DIFF_VARIABLES = {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
"""Without git's settings, which the program may have written."""
_CHECK_PROGRAM_SCRIPT = """test -x "$1" || exit 1
read -r first < "$1"
case $first in "#!"*) set -- ${first#??}; echo "$1"; test -x "$1" ;; esac"""
_RUN_WITH_LOG_SCRIPT = 'exec "$@" > ../log 2>&1 < /dev/null'


class HarnessFolder:
    """Folder `work` of a sandbox, beside a home and the log of the program."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._source_dir: Path | None = None
        self._root = f"{sandbox.folder.rstrip('/')}/harness"
        self._work = f"{self._root}/work"
        self.home = f"{self._root}/home"

    async def fill(self, source_dir: Path | None) -> None:
        """Copy a folder of this machine into it."""
        if source_dir is not None and not source_dir.is_dir():
            raise AgentError(
                f"there is no folder {source_dir}", hint="name a folder in the task's `folder`"
            )
        self._source_dir = source_dir
        await self._run_script(_PREPARE_SCRIPT, folder=self._sandbox.folder)
        await self._unpack_source("work")

    async def write_into_home(self, files: Mapping[str, str]) -> None:
        """Write settings of the program, which nobody else may read."""
        for name, text in files.items():
            await self._sandbox.put(f"{self.home}/{name}", text, 0o600)

    async def check_program(self, path: str, key: str) -> None:
        """Refuse a program that the sandbox does not show, or whose first line names such a one."""
        words = ["/bin/sh", "-c", _CHECK_PROGRAM_SCRIPT, "check", path]
        ended = await self._sandbox.exec(words, timeout_s=SCRIPT_TIMEOUT_S)
        if ended.exit_code != 0:
            missing = ended.stdout.decode(errors="replace").strip() or path
            raise RecipeError(
                f"the sandbox does not show {missing}, or its user may not run it",
                key=key,
                hint="name the folder that holds it in rollout.agent.sandbox.readonly_folders; a "
                "link counts as what it leads to",
            )

    async def run_with_output_to_log(
        self, command: Sequence[str], variables: Mapping[str, str], timeout_s: float
    ) -> CommandResult:
        return await self._sandbox.exec(
            ["/bin/sh", "-c", _RUN_WITH_LOG_SCRIPT, "harness", *command],
            timeout_s=timeout_s,
            folder=self._work,
            variables={"HOME": self.home, "TERM": "dumb", **variables},
        )

    async def compute_diff_against_source(self) -> str:
        """What changed in it, as git shows it, once nothing of the program runs any more.

        It is compared with a new copy: whatever lay in the sandbox, the program could write.
        """
        await self._run_script(_PREPARE_DIFF_SCRIPT)
        await self._unpack_source("before")
        await self._run_script(_WRITE_DIFF_SCRIPT, _DIFF_VARIABLES)
        return (await self._read("diff", MAX_DIFF_BYTES)).decode(errors="replace")

    async def read_log(self, max_bytes: int) -> str:
        """The end of what the program printed."""
        tail = await self._run_script(f"tail -c {max_bytes} log")
        return tail.stdout.decode(errors="replace")

    async def copy_to(self, target: Path) -> None:
        """Copy its files, folders and links to a folder of this machine; nothing else is written.

        Links that lead out of it, such as a virtual environment's to its Python, devices and pipes
        are left out.
        """
        try:
            content = await self._sandbox.pack(self._work, MAX_FOLDER_BYTES)
            left_out = await asyncio.to_thread(_unpack, content, target)
        except (OSError, ValueError, tarfile.TarError) as error:
            raise AgentError(f"the folder of the program cannot be copied: {error}") from error
        if left_out:
            log.info("the copy of a program's folder leaves out %d links, which lead out", left_out)

    async def _read(self, file_name: str, max_bytes: int) -> bytes:
        try:
            return await self._sandbox.get(f"{self._root}/{file_name}", max_bytes)
        except OSError as error:
            raise AgentError(f"the program left too much: {error}") from error

    async def _unpack_source(self, place: str) -> None:
        packed = await asyncio.to_thread(_pack, self._source_dir)
        try:
            await self._sandbox.unpack(packed, f"{self._root}/{place}")
        except OSError as error:
            raise AgentError(f"the task's folder does not fit into its sandbox: {error}") from error

    async def _run_script(
        self, script: str, variables: Mapping[str, str] | None = None, folder: str = ""
    ) -> CommandResult:
        ended = await self._sandbox.exec(
            script, timeout_s=SCRIPT_TIMEOUT_S, folder=folder or self._root, variables=variables
        )
        if ended.exit_code != 0:
            raise AgentError(
                f"the folder of the program cannot be prepared or read: {ended.text.strip()[-500:]}"
            )
        return ended


def _pack(source_dir: Path | None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        if source_dir is not None:
            archive.add(source_dir, arcname=".")
    return packed.getvalue()


def _unpack(content: bytes, target: Path) -> int:
    tree = UnpackedTree(target, max_bytes=MAX_FOLDER_BYTES, max_files=MAX_FOLDER_FILES)
    tree.write_archive(io.BytesIO(content))
    tree.apply_folder_modes()
    return tree.remove_links_leading_out()
