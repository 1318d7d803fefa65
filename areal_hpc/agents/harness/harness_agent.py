"""Agent that lets a command-line program work on a task's folder, and has a function judge it."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.agents.harness.harness_folder import HarnessFolder
from areal_hpc.agents.harness.installation import HARNESSES_DIR, find_installed_harness
from areal_hpc.agents.harness.programs import (
    QUIET_VARIABLES,
    HarnessProgram,
    HarnessTemplateValues,
    get_harness_program,
)
from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.execution.agent_sandboxes import SANDBOX_TASK_COLUMN, make_agent_sandboxes
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.wire.agent_reward import Reward

REWARD_RECIPE_KEY = "rollout.workflow_kwargs.reward"
HARNESS_RECIPE_KEY = "rollout.workflow_kwargs.harness"
TASK_PLACEHOLDER = "{task}"
"""In a command: where the task's text stands; without it, it comes last."""
UNISOLATED_EXECUTION_CONFIG = AgentExecutionConfig.model_validate(
    {"isolation": "none", "sandbox": {"memory_bytes": 16 << 30, "processes": 4096}}
)
"""Where a program runs without a sandbox: Node.js and Bun reserve far more than they use."""
CLEAN_UP_S = 60.0
"""What the end of an episode may take beside the program: the diff, the copy of the folder."""


class HarnessAgent:
    """Runs a program in a copy of the task's folder, `data["folder"]`, or in an empty one.

    A known harness is pointed at the session by its own settings; a command learns from
    `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and their keys whom to call. It runs in the task's
    sandbox if there is one, else as you do. All that it started ends with it.

    Args:
        reward: `package.module:function` of `folder` (Path), `diff`, `exit_code`, `timed_out`,
            `log` and `data`, all by name; returns a number or a `Reward`.
        harness: A name of `HARNESSES`, such as `opencode`. Its text is the last message of the
            task.
        command: In its place a program and its arguments.
        harnesses_dir: Where `areal-hpc install-harness` has put it.
        context_tokens: What a harness is told of the length of the model's context.
        timeout_s: Time of the program; it is killed then, and judged all the same.
        variables: More of its environment.
        max_log_bytes: What is kept of its output, from the end.

    Raises:
        RecipeError: There is not one program, it is not installed, or there is no such function.
    """

    def __init__(
        self,
        *,
        reward: str,
        harness: str = "",
        command: Sequence[str] = (),
        harnesses_dir: str = str(HARNESSES_DIR),
        context_tokens: int = 131072,
        timeout_s: float = 540.0,
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
        self.reward: Callable[..., float | Reward] = load_user_function(reward, REWARD_RECIPE_KEY)
        self.context_tokens = context_tokens
        self.timeout_s = timeout_s
        self.variables = dict(variables or {})
        self.max_log_bytes = max_log_bytes

    def check_isolation(self, isolation: str | None) -> None:
        """Demand that a recipe says how the program is isolated."""
        if isolation is None:
            raise RecipeError(
                "rollout.agent.isolation is null, and the program would run as you do",
                key="rollout.agent.isolation",
                hint="use bwrap, with rollout.agent.sandbox.network=session-only; or say none: "
                "then what the model has it do can read and change all that you can",
            )

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | Reward:
        async with self._acquire_sandbox(data, extra_kwargs) as sandbox:
            folder = HarnessFolder(sandbox)
            await folder.fill(Path(data["folder"]) if data.get("folder") else None)
            command, variables = self.command, self.variables
            if self.program is not None:
                key = extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"]
                command, own = await self._set_up_program(self.program, folder, sandbox, key)
                variables = own | variables
            command = insert_task_into_command(command, get_task_text(data))
            ended = await folder.run_with_output_to_log(command, variables, self.timeout_s)
            await sandbox.kill_all_commands()  # nothing goes on writing while its work is read
            diff, log = (
                await folder.compute_diff_against_source(),
                await folder.read_log(self.max_log_bytes),
            )
            with tempfile.TemporaryDirectory() as copy:
                await folder.copy_to(Path(copy))
                task = {name: value for name, value in data.items() if name != SANDBOX_TASK_COLUMN}
                return await asyncio.to_thread(
                    self.reward,
                    folder=Path(copy),
                    diff=diff,
                    exit_code=ended.exit_code,
                    timed_out=ended.timed_out,
                    log=log,
                    data=task,
                )

    async def _set_up_program(
        self, program: HarnessProgram, folder: HarnessFolder, sandbox: Sandbox, api_key: str
    ) -> tuple[list[str], dict[str, str]]:
        root_url = sandbox.base_url.removesuffix("/v1")
        place = HarnessTemplateValues(
            root_url, api_key, folder.home, self.installed_in, self.context_tokens
        )
        command = [place.fill(word) for word in program.command]
        await folder.check_program(command[0], HARNESS_RECIPE_KEY)
        await folder.write_into_home(
            {name: place.fill(text) for name, text in program.files.items()}
        )
        own = {name: place.fill(value) for name, value in program.variables.items()}
        return command, QUIET_VARIABLES | own

    @asynccontextmanager
    async def _acquire_sandbox(
        self, data: dict[str, Any], extra_kwargs: dict[str, Any]
    ) -> AsyncIterator[Sandbox]:
        if (given := data.get(SANDBOX_TASK_COLUMN)) is not None:
            if not given.base_url:
                raise RecipeError(
                    "the program cannot reach the model from its sandbox",
                    key="rollout.agent.sandbox.network",
                    hint="set rollout.agent.sandbox.network=session-only",
                )
            yield given
            return
        url = extra_kwargs.get("base_url") or os.environ["OPENAI_BASE_URL"]
        key = extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"]
        sandboxes = make_agent_sandboxes(UNISOLATED_EXECUTION_CONFIG, warm=0)
        assert sandboxes is not None
        own: dict[str, Any] = {}
        async with sandboxes.acquire(own) as free:
            lifetime_s = self.timeout_s + CLEAN_UP_S
            await free.hand_to_agent(own, url, key, lifetime_s)
            yield own[SANDBOX_TASK_COLUMN]


def insert_task_into_command(command: Sequence[str], task: str) -> list[str]:
    task = f" {task}" if task.startswith("-") else task
    if any(TASK_PLACEHOLDER in word for word in command):
        return [word.replace(TASK_PLACEHOLDER, task) for word in command]
    return [*command, task]


def get_task_text(data: dict[str, Any]) -> str:
    """What the program is asked to do: the last message of the task."""
    messages = data.get("messages") or [{}]
    text = messages[-1].get("content")
    if not isinstance(text, str) or not text or "\0" in text:
        raise AgentError(
            f"expected a text as the last of `messages` of the task, got {text!r:.200}",
            hint="give each task messages: [{role: user, content: ...}]",
        )
    return text
