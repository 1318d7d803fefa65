"""Agent that runs a command-line program on a task; a function or the task's tests judge it."""

import asyncio
import io
import logging
import os
import shlex
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.agents.harness.programs import (
    HARNESSES_DIR,
    QUIET_VARIABLES,
    HarnessProgram,
    HarnessTemplateValues,
    find_installed_harness,
    get_harness_program,
)
from areal_hpc.errors import AgentError, RecipeError, SandboxLostError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.reward.harbor import LOGS_DIR, HarborTask, find_harbor_task
from areal_hpc.rollout.execution.agent_sandboxes import SANDBOX_TASK_COLUMN, make_agent_sandboxes
from areal_hpc.sandbox.channel import CommandResult
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.unpacked_tree import UnpackedTree
from areal_hpc.wire.agent_reward import Reward

log = logging.getLogger(__name__)

MAX_DIFF_BYTES = 4 << 20
MAX_FOLDER_BYTES, MAX_FOLDER_FILES = 256 << 20, 100_000
SCRIPT_TIMEOUT_S = 60.0
_PREPARE_SCRIPT = "git --version > /dev/null && mkdir -p home work"
_PREPARE_DIFF_SCRIPT = "rm -rf before before.git diff && mkdir before"
_GIT = "git --git-dir=before.git -c user.name=areal-hpc -c user.email=areal-hpc@localhost"
# All files go into one pack: one file for each would count towards the sandbox's limit of files.
_GIT_ADD_ARGUMENTS = "-c core.bigFileThreshold=1 add -A"
_WRITE_DIFF_SCRIPT = f"""set -e
{_GIT} --work-tree=before init -q
{_GIT} --work-tree=before {_GIT_ADD_ARGUMENTS}
{_GIT} --work-tree=before commit -q --allow-empty -m before
{_GIT} --work-tree=work {_GIT_ADD_ARGUMENTS}
{_GIT} --work-tree=work diff --cached --binary HEAD > diff"""
_DIFF_VARIABLES = {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
"""Variables that exclude git's settings, which the program may have written."""
_CHECK_PROGRAM_SCRIPT = """test -x "$1" || exit 1
read -r first < "$1"
case $first in "#!"*) set -- ${first#??}; echo "$1"; test -x "$1" ;; esac"""
_RUN_WITH_LOG_SCRIPT = 'exec "$@" > "$0" 2>&1 < /dev/null'


class HarnessFolder:
    """Folder `work` in a sandbox, beside the program's home and log.

    In a Harbor task's sandbox the program works in the task's own folder instead.
    """

    def __init__(self, sandbox: Sandbox, *, has_harbor_task: bool = False) -> None:
        self._sandbox = sandbox
        self._source_dir: Path | None = None
        self._root = f"{sandbox.folder.rstrip('/')}/harness"
        self._work = f"{self._root}/work"
        if has_harbor_task:
            self._root, self._work = f"{LOGS_DIR}/agent", sandbox.folder
        self.home = f"{self._root}/home"

    async def make_home(self) -> None:
        await self._run_script(f"mkdir -p {self.home}", folder="/")

    async def fill(self, source_dir: Path | None) -> None:
        """Copy a folder of this machine into `work`."""
        if source_dir is not None and not source_dir.is_dir():
            raise AgentError(
                f"there is no folder {source_dir}", hint="name a folder in the task's `folder`"
            )
        self._source_dir = source_dir
        await self._run_script(f"mkdir -p {shlex.quote(self._root)}", folder=self._sandbox.folder)
        await self._run_script(_PREPARE_SCRIPT)
        await self._unpack_source("work")

    async def check_program(self, path: str, key: str) -> None:
        """Refuse a program that the sandbox does not show, or whose interpreter it does not."""
        words = ["/bin/sh", "-c", _CHECK_PROGRAM_SCRIPT, "check", path]
        result = await self._sandbox.exec(words, timeout_s=SCRIPT_TIMEOUT_S)
        if result.exit_code != 0:
            missing = result.stdout.decode(errors="replace").strip() or path
            raise RecipeError(
                f"the sandbox does not show {missing}, or its user may not run it",
                key=key,
                hint="name its folder in rollout.agent.sandbox.readonly_folders; for a link, name "
                "the folder of its target",
            )

    async def run_with_output_to_log(
        self, command: Sequence[str], variables: Mapping[str, str], timeout_s: float
    ) -> CommandResult:
        return await self._sandbox.exec(
            ["/bin/sh", "-c", _RUN_WITH_LOG_SCRIPT, f"{self._root}/log", *command],
            timeout_s=timeout_s,
            folder=self._work,
            variables={"HOME": self.home, "TERM": "dumb", **variables},
        )

    async def compute_diff_against_source(self) -> str:
        """Compute the diff of `work` by git, after the program and its processes have ended.

        It is against a new copy of the source, as the program could write all files in the sandbox.
        """
        await self._run_script(_PREPARE_DIFF_SCRIPT)
        await self._unpack_source("before")
        await self._run_script(_WRITE_DIFF_SCRIPT, _DIFF_VARIABLES)
        return (await self._read("diff", MAX_DIFF_BYTES)).decode(errors="replace")

    async def read_log(self, max_bytes: int) -> str:
        """Read the end of the program's output; it is empty if the program removed its log."""
        path = shlex.quote(f"{self._root}/log")
        script = f"test -f {path} && tail -c {max_bytes} {path}"
        try:
            tail = await self._sandbox.exec(script, timeout_s=SCRIPT_TIMEOUT_S, folder="/")
        except SandboxLostError:
            return ""
        return tail.stdout.decode(errors="replace")

    async def copy_to(self, target: Path) -> None:
        """Copy the files, folders and links of `work` to a folder of this machine.

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

    async def _unpack_source(self, folder_name: str) -> None:
        packed = await asyncio.to_thread(_pack, self._source_dir)
        try:
            await self._sandbox.unpack(packed, f"{self._root}/{folder_name}")
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


MAX_LOGGED_BYTES = 1000
REWARD_RECIPE_KEY = "rollout.workflow_kwargs.reward"
HARNESS_RECIPE_KEY = "rollout.workflow_kwargs.harness"
TASK_PLACEHOLDER = "{task}"
"""Placeholder of the task's text in a command; without it the text is the last argument."""
UNISOLATED_EXECUTION_CONFIG = AgentExecutionConfig.model_validate(
    {"isolation": "none", "sandbox": {"memory_bytes": 16 << 30, "processes": 4096}}
)
"""Configuration without isolation; Node.js and Bun reserve far more memory than they use."""
DEFAULT_TIMEOUT_S = 540.0
"""Time limit of the program where neither the recipe nor the task sets one."""
CLEAN_UP_S = 60.0
"""Time limit of an episode's end, after the program: the diff, and the copy of the folder."""


class HarnessAgent:
    """Agent that runs a program in a copy of the task's `data["folder"]`, or in an empty one.

    A known harness gets the session's URL and key in its own settings; a command reads them from
    `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and their keys. The program runs in the task's sandbox
    if there is one, else as the calling user. All its processes end with it. A Harbor task is
    played in its own folder, for its own time, and judged by its tests.

    Args:
        reward: `package.module:function` with the keyword arguments `folder` (Path), `diff`,
            `exit_code`, `timed_out`, `log` and `data`; returns a number or a `Reward`. Harbor's
            tasks need none.
        harness: Name in `HARNESSES`, such as `opencode`; its prompt is the task's last message.
        command: Program and its arguments, instead of a harness.
        harnesses_dir: Folder of `areal-hpc install-harness`.
        context_tokens: Length of the model's context for the harness's settings.
        timeout_s: Time limit of the program; one that is killed is judged all the same. None: that
            of a Harbor task, else `DEFAULT_TIMEOUT_S`. A Harbor task's own limit may be shorter.
        variables: Further environment variables of the program.
        max_log_bytes: Size of the program's output that is kept, from its end.

    Raises:
        RecipeError: Not exactly one program is named, or the program or the function is missing.
    """

    def __init__(
        self,
        *,
        reward: str = "",
        harness: str = "",
        command: Sequence[str] = (),
        harnesses_dir: str = str(HARNESSES_DIR),
        context_tokens: int = 131072,
        timeout_s: float | None = None,
        variables: dict[str, str] | None = None,
        max_log_bytes: int = 64 << 10,
    ) -> None:
        if harness and command:
            raise RecipeError(
                "expected a harness or a command, got both",
                key=HARNESS_RECIPE_KEY,
                hint="remove one of them",
            )
        if not harness and (isinstance(command, str) or not command):
            raise RecipeError(
                f"expected a list of a program and its arguments, got {command!r}",
                key="rollout.workflow_kwargs.command",
                hint="write it as [program, argument], or name a harness",
            )
        self.program: HarnessProgram | None = None
        self.command = [str(word) for word in command]
        if harness:
            self.program = get_harness_program(harness, HARNESS_RECIPE_KEY)
            self.command = list(self.program.command)
            self.installed_in = str(
                find_installed_harness(harness, Path(harnesses_dir).absolute(), HARNESS_RECIPE_KEY)
            )
        self.reward: Callable[..., float | Reward] | None = None
        if reward:
            self.reward = load_user_function(reward, REWARD_RECIPE_KEY)
        self.context_tokens = context_tokens
        self.timeout_s = timeout_s
        self.variables = dict(variables or {})
        self.max_log_bytes = max_log_bytes

    def check_isolation(self, isolation: str | None) -> None:
        """Refuse a recipe that does not set how the program is isolated."""
        if isolation is None:
            raise RecipeError(
                "rollout.agent.isolation is null, and the program would run as you do",
                key="rollout.agent.isolation",
                hint="use bwrap, with rollout.agent.sandbox.network=session-only; or none: then "
                "the commands of the model can read and change all that you can",
            )

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | Reward:
        harbor_task, reward = find_harbor_task(data), self.reward
        if harbor_task is None and reward is None:
            raise RecipeError(
                "nothing judges what the program leaves",
                key=REWARD_RECIPE_KEY,
                hint="name a function, or a folder of Harbor's tasks in train_dataset.path",
            )
        async with self._acquire_sandbox(data, extra_kwargs) as sandbox:
            folder = HarnessFolder(sandbox, has_harbor_task=harbor_task is not None)
            if harbor_task is None:
                await folder.fill(Path(data["folder"]) if data.get("folder") else None)
            else:
                await folder.make_home()
            command, variables = self.command, self.variables
            if self.program is not None:
                key = extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"]
                command, preset = await self._set_up_program(self.program, folder, sandbox, key)
                variables = preset | variables
            command = insert_task_into_command(command, get_task_text(data))
            timeout_s = compute_program_timeout_s(self.timeout_s, harbor_task)
            result = await folder.run_with_output_to_log(command, variables, timeout_s)
            await sandbox.kill_all_commands()  # no process may write while the work is read
            if harbor_task is not None:
                judged = await harbor_task.run_tests(sandbox)
                if result.exit_code != 0:
                    output = await folder.read_log(MAX_LOGGED_BYTES)
                    log.info("the program ended with exit code %d: %s", result.exit_code, output)
                return judged
            assert reward is not None
            diff, output = (
                await folder.compute_diff_against_source(),
                await folder.read_log(self.max_log_bytes),
            )
            with tempfile.TemporaryDirectory() as copy:
                await folder.copy_to(Path(copy))
                task = {name: value for name, value in data.items() if name != SANDBOX_TASK_COLUMN}
                return await asyncio.to_thread(
                    reward,
                    folder=Path(copy),
                    diff=diff,
                    exit_code=result.exit_code,
                    timed_out=result.timed_out,
                    log=output,
                    data=task,
                )

    async def _set_up_program(
        self, program: HarnessProgram, folder: HarnessFolder, sandbox: Sandbox, api_key: str
    ) -> tuple[list[str], dict[str, str]]:
        root_url = sandbox.base_url.removesuffix("/v1")
        values = HarnessTemplateValues(
            root_url, api_key, folder.home, self.installed_in, self.context_tokens
        )
        command = [values.fill(word) for word in program.command]
        await folder.check_program(command[0], HARNESS_RECIPE_KEY)
        for name, text in program.files.items():
            await sandbox.put(f"{folder.home}/{name}", values.fill(text), 0o600)
        variables = {name: values.fill(value) for name, value in program.variables.items()}
        return command, QUIET_VARIABLES | variables

    @asynccontextmanager
    async def _acquire_sandbox(
        self, data: dict[str, Any], extra_kwargs: dict[str, Any]
    ) -> AsyncIterator[Sandbox]:
        if (sandbox := data.get(SANDBOX_TASK_COLUMN)) is not None:
            if not sandbox.base_url:
                raise RecipeError(
                    "the program cannot reach the model from its sandbox",
                    key="rollout.agent.sandbox.network",
                    hint="set rollout.agent.sandbox.network=session-only",
                )
            yield sandbox
            return
        url = extra_kwargs.get("base_url") or os.environ["OPENAI_BASE_URL"]
        key = extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"]
        sandboxes = make_agent_sandboxes(UNISOLATED_EXECUTION_CONFIG, warm=0)
        assert sandboxes is not None
        own_task: dict[str, Any] = {}
        async with sandboxes.acquire(own_task) as acquired:
            lifetime_s = compute_program_timeout_s(self.timeout_s, None) + CLEAN_UP_S
            await acquired.hand_to_agent(own_task, url, key, lifetime_s)
            yield own_task[SANDBOX_TASK_COLUMN]


def compute_program_timeout_s(recipe_s: float | None, harbor_task: HarborTask | None) -> float:
    """Return the shorter of the recipe's and the task's limit, of those that are set."""
    task_s = harbor_task.agent_timeout_s if harbor_task is not None else None
    limits = [limit_s for limit_s in (recipe_s, task_s) if limit_s is not None]
    return min(limits, default=DEFAULT_TIMEOUT_S)


def insert_task_into_command(command: Sequence[str], task: str) -> list[str]:
    task = f" {task}" if task.startswith("-") else task
    if any(TASK_PLACEHOLDER in word for word in command):
        return [word.replace(TASK_PLACEHOLDER, task) for word in command]
    return [*command, task]


def get_task_text(data: dict[str, Any]) -> str:
    """Return the program's prompt, which is the last message of the task."""
    messages = data.get("messages") or [{}]
    text = messages[-1].get("content")
    if not isinstance(text, str) or not text or "\0" in text:
        raise AgentError(
            f"expected a text as the last of `messages` of the task, got {text!r:.200}",
            hint="give each task messages: [{role: user, content: ...}]",
        )
    return text
