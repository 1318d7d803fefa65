"""Harbor tasks in a sandbox: preparing their files, running their tests, the reward.

A task's row of the task set has a `HarborTask` under `HARBOR_TASK_COLUMN`. Its tests are copied
into the sandbox after the agent and all its processes have ended; their verdict is read from
outside.
"""

import asyncio
import io
import json
import shlex
import tarfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from areal_hpc.errors import (
    InvalidRewardError,
    NodeResourceShortageError,
    RecipeError,
    SandboxLostError,
)
from areal_hpc.sandbox.channel import CommandResult
from areal_hpc.sandbox.runtimes import Runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.decoding import convert_value

HARBOR_TASK_COLUMN = "harbor"
"""Column of the task set with the Harbor task."""
LOGS_DIR, TESTS_DIR, SOLUTION_DIR = "/logs", "/tests", "/solution"
HARBOR_FOLDERS = (LOGS_DIR, TESTS_DIR, SOLUTION_DIR)
"""Folders that Harbor's tasks expect."""
VERDICT_DIR = f"{LOGS_DIR}/verifier"
TEST_OUTPUT_FILE = f"{VERDICT_DIR}/test-stdout.txt"
MAX_VERDICT_BYTES = 1 << 16
READ_RETRY_S, READ_PAUSE_S = 60.0, 2.0
"""Time for which reading a task's files is repeated, and the pause between two tries: a file server
or a descriptor may be missing for a moment."""
_MAX_NOTE_LENGTH = 2000
_LIST_LEFT_SCRIPT = (
    f"for folder in {TESTS_DIR} {VERDICT_DIR}; do test ! -e $folder && test ! -h $folder || "
    "find $folder ! -type d || exit; done"
)
"""Script that prints what an agent left in folders of the judge, which may be absent."""
_TEST_VARIABLES = {"HOME": VERDICT_DIR, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment of tests; their home is not the agent's, whose settings could change the verdict."""


class HarborTask(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a Harbor task folder that concern its sandbox."""

    folder: str
    """Path of the task folder on every node."""
    root: str = ""
    """Folder, tar or image of its root file system; empty: the recipe's."""
    has_network: bool = True
    """Whether commands may have the recipe's open network; else they reach the session alone."""
    work_dir: str = ""
    """Working directory of commands; empty: the sandbox's own."""
    variables: dict[str, str] = {}
    """Environment variables of commands."""
    copies: tuple[tuple[str, str], ...] = ()
    """Files and folders below `folder`, and their paths in the sandbox."""
    folders: tuple[str, ...] = ()
    """Folders that commands may write in, beside those of every sandbox."""
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    agent_timeout_s: float | None = None
    """Time limit of the agent; None: the recipe's."""
    test_timeout_s: float = 600.0
    test_variables: dict[str, str] = {}
    solution_variables: dict[str, str] = {}

    def apply_task_to_sandbox_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Restrict a recipe's sandbox to the task's limits, and set the task's root."""
        limits = spec.limits
        limits = replace(
            limits,
            memory_bytes=min(limits.memory_bytes, self.memory_bytes or limits.memory_bytes),
            disk_bytes=min(limits.disk_bytes, self.disk_bytes or limits.disk_bytes),
        )
        network = spec.network
        if network == "open" and not self.has_network:
            network = "session-only"
        changed = replace(spec, network=network, limits=limits, writable_folders=self.folders)
        return replace(changed, root=Path(self.root), variables={}) if self.root else changed

    async def prepare(self, sandbox: Sandbox) -> None:
        """Copy the task's files in, and set working directory and environment of commands."""
        folders = [self.work_dir] if self.work_dir else []
        pairs = [(self._resolve(source), target) for source, target in self.copies]
        try:
            await _put_files_into_sandbox(sandbox, pairs, folders)
        except OSError as error:
            raise RecipeError(
                f"the files of the Harbor task do not fit into its sandbox: {error}",
                key=self.folder,
                hint="raise rollout.agent.sandbox.disk_bytes, files, or the task's storage_mb",
            ) from error
        sandbox.folder = self.work_dir or sandbox.folder
        sandbox.add_variables(self.variables)

    async def run_solution_script(self, sandbox: Sandbox) -> CommandResult:
        """Run the task's own solution, `solution/solve.sh`, in place of an agent."""
        await _put_files_into_sandbox(sandbox, [(self._resolve("solution"), SOLUTION_DIR)])
        return await sandbox.exec(
            f"{_build_run_command('solution/solve.sh')} 2>&1",
            timeout_s=self.agent_timeout_s or self.test_timeout_s,
            variables=self.solution_variables,
        )

    async def run_tests(self, sandbox: Sandbox) -> Reward:
        """Kill all processes in the sandbox, run the tests, and read their verdict.

        If they write no reward or fail (exit code not 0), the reward is 0, the metric `no_verdict`
        is 1, and the note has the reason. Of several rewards `reward` counts, else their mean. The
        metric `tampered` is 1 if there are files or links where the tests and their verdict go;
        it is missing if that could not be looked up.
        """
        await sandbox.kill_all_commands()
        left = await sandbox.exec(_LIST_LEFT_SCRIPT, timeout_s=10.0)
        reward = await self._run_task_tests(sandbox)
        if not left.stdout and left.exit_code != 0:
            return reward
        facts = {"tampered": float(bool(left.stdout))}
        return msgspec.structs.replace(reward, metrics={**reward.metrics, **facts})

    async def _run_task_tests(self, sandbox: Sandbox) -> Reward:
        try:
            await self._put_tests(sandbox)
            result = await sandbox.exec(
                f"{_build_run_command('tests/test.sh')} > {TEST_OUTPUT_FILE} 2>&1",
                timeout_s=self.test_timeout_s,
                variables={**_TEST_VARIABLES, **self.test_variables},
            )
            await sandbox.kill_all_commands()
            if result.timed_out:
                return build_no_verdict_reward(
                    f"the tests took longer than {self.test_timeout_s:g} s"
                )
            if result.exit_code != 0:  # an answer may have broken the tests
                return build_no_verdict_reward(
                    f"the tests failed to judge (exit code {result.exit_code}); "
                    f"{await _describe_test_output(sandbox)}"
                )
            verdict = await _read_first_verdict_file(sandbox, ("reward.json", "reward.txt"))
            return parse_verdict(*verdict)
        except SandboxLostError as error:
            return build_no_verdict_reward(error.problems[0].message)
        except (OSError, ValueError) as error:
            return build_no_verdict_reward(f"{error}; {await _describe_test_output(sandbox)}")

    async def _put_tests(self, sandbox: Sandbox) -> None:
        for folder in (TESTS_DIR, VERDICT_DIR):
            await sandbox.remove(folder)
        pairs = [(self._resolve("tests"), TESTS_DIR)]
        await _put_files_into_sandbox(sandbox, pairs, [VERDICT_DIR])

    def _resolve(self, name: str) -> Path:
        return resolve_task_path(Path(self.folder), name)


def resolve_task_path(folder: Path, name: str) -> Path:
    """Resolve a path of a task with its links; refuse one that leads out of the task's folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RecipeError(
            f"{folder / name} of a task leads to {path}, out of the task's folder",
            key=str(folder / name),
            hint="put the file itself there, if the task may have it",
        )
    return path


def find_harbor_task(data: Mapping[str, Any]) -> HarborTask | None:
    """Return the Harbor task of a row; None if it has none."""
    if HARBOR_TASK_COLUMN not in data:
        return None
    try:
        return convert_value(data[HARBOR_TASK_COLUMN], HarborTask)
    except msgspec.ValidationError as error:
        raise RecipeError(
            f"the task's column {HARBOR_TASK_COLUMN!r} is no Harbor task: {error}",
            key=HARBOR_TASK_COLUMN,
            hint="rename the column, or let a folder of tasks make the rows",
        ) from error


async def judge_harbor_task(data: Mapping[str, Any]) -> Reward:
    """Judge a row's task after its agent has ended; an agent's `run` returns this reward."""
    task, sandbox = find_harbor_task(data), data.get("sandbox")
    if task is None or not isinstance(sandbox, Sandbox):
        raise RecipeError(
            "the task is no Harbor task with a sandbox",
            key="rollout.agent.isolation",
            hint="name a folder of tasks in train_dataset.path, and rollout.agent.isolation=bwrap",
        )
    return await task.run_tests(sandbox)


def parse_verdict(file_name: str, content: bytes) -> Reward:
    """Parse the reward in a file `reward.json` or `reward.txt`."""
    try:
        verdict = json.loads(content) if file_name.endswith(".json") else float(content)
        values = verdict if isinstance(verdict, dict) else {"reward": verdict}
        if not values:
            raise ValueError("it is empty")
        parts = Reward(0.0, parts=values).parts
        mean = sum(parts.values()) / len(parts)
        shown_parts = parts if isinstance(verdict, dict) else {}
        return Reward(parts.get("reward", mean), parts=shown_parts, metrics={"no_verdict": 0.0})
    except (ValueError, InvalidRewardError, RecursionError) as error:
        raise ValueError(f"{file_name} holds no reward: {error}") from error


def build_no_verdict_reward(reason: str) -> Reward:
    """Build the reward of an episode whose tests gave no verdict."""
    return Reward(0.0, metrics={"no_verdict": 1.0}, note=f"no verdict: {reason}"[:_MAX_NOTE_LENGTH])


def build_archive(pairs: Iterable[tuple[Path, str]], *, folders: Iterable[str] = ()) -> bytes:
    """Build a tar of files and folders of this machine, with their paths in a sandbox.

    All of them become the unpacking user's; `folders` are made empty.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in folders:
            member = tarfile.TarInfo(_name_member(folder))
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for source, target in pairs:
            archive.add(source, _name_member(target), filter=_normalize_member)
    return stream.getvalue()


async def _put_files_into_sandbox(
    sandbox: Sandbox, pairs: Iterable[tuple[Path, str]], folders: Iterable[str] = ()
) -> None:
    archive = await _build_archive_with_retries([*pairs], [*folders])
    try:
        await sandbox.unpack(archive)
    except TimeoutError as error:
        raise NodeResourceShortageError(
            f"the files of a Harbor task could not be put into its sandbox: {error}",
            hint="lower rollout.max_concurrent_rollouts",
        ) from error


async def _build_archive_with_retries(
    pairs: Sequence[tuple[Path, str]], folders: Sequence[str]
) -> bytes:
    """Build a tar of the files in a thread, as their storage may be slow.

    Errors are retried for `READ_RETRY_S`, because without the files a played episode is lost.
    """
    give_up_at = time.monotonic() + READ_RETRY_S
    while True:
        try:
            return await asyncio.to_thread(build_archive, pairs, folders=folders)
        except OSError as error:
            if time.monotonic() >= give_up_at:
                raise NodeResourceShortageError(
                    f"the files of a Harbor task cannot be read: {error}",
                    hint="see that this node reads the task's folder",
                ) from error
        await asyncio.sleep(READ_PAUSE_S)


def _normalize_member(tar_member: tarfile.TarInfo) -> tarfile.TarInfo:
    tar_member.uid = tar_member.gid = 0
    tar_member.uname = tar_member.gname = ""
    tar_member.mode |= 0o700 if tar_member.isdir() else 0o600
    return tar_member


def _name_member(member_path: str) -> str:
    return str(PurePosixPath(member_path)).lstrip("/") or "."


def _build_run_command(script: str) -> str:
    """Build the command that runs a script: by its first line's interpreter, else by the shell.

    `exec` leaves no shell that waits: the script's processes could write to the shell's memory.
    """
    quoted = shlex.quote(f"/{script}")
    return f"chmod +x {quoted} && exec {quoted}"


async def _read_first_verdict_file(sandbox: Sandbox, names: Iterable[str]) -> tuple[str, bytes]:
    for name in names:
        try:
            return name, await sandbox.get(f"{VERDICT_DIR}/{name}", MAX_VERDICT_BYTES)
        except OSError as error:
            if "No such file" not in str(error):
                raise
    raise OSError(f"the tests wrote no {VERDICT_DIR}/reward.txt or reward.json")


async def _describe_test_output(sandbox: Sandbox) -> str:
    try:
        tail = await sandbox.exec(
            ["tail", "-c", str(_MAX_NOTE_LENGTH // 2), TEST_OUTPUT_FILE], timeout_s=10.0
        )
    except SandboxLostError:
        return "the sandbox is gone"
    return f"they printed: {tail.stdout.decode(errors='replace')}" if tail.stdout else "no output"


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Rewards of a task for its own solution, and for doing nothing."""

    name: str
    oracle: Reward | None
    """Reward of the task's own solution; None if it has none."""
    no_action_reward: Reward
    """Reward of doing nothing."""

    @property
    def has_discriminating_tests(self) -> bool:
        """Whether the tests judge both, and reward the solution more than doing nothing."""
        if self.oracle is None:
            return (
                not self.no_action_reward.metrics["no_verdict"] and self.no_action_reward.value < 1
            )
        verdicts = (self.oracle, self.no_action_reward)
        are_judged = all(not verdict.metrics["no_verdict"] for verdict in verdicts)
        return are_judged and self.oracle.value > self.no_action_reward.value


async def check_tasks_in_order(
    rows: Sequence[dict[str, Any]], runtime: Runtime, spec: SandboxSpec, at_once: int
) -> AsyncIterator[TaskCheck]:
    """Check rows, `at_once` of them concurrently, and yield the results in the order of rows."""
    slots = asyncio.Semaphore(at_once)

    async def check(row: dict[str, Any]) -> TaskCheck:
        async with slots:
            return await judge_task(row, runtime, spec)

    checks = [asyncio.create_task(check(row)) for row in rows]
    try:
        for running_check in checks:
            yield await running_check
    finally:
        for running_check in checks:
            running_check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)


async def judge_task(row: dict[str, Any], runtime: Runtime, spec: SandboxSpec) -> TaskCheck:
    """Play a task with its solution and with no action, each time in a sandbox of its own."""
    task = find_harbor_task(row)
    assert task is not None
    has_solution = Path(task.folder, "solution", "solve.sh").is_file()
    oracle = await _play(task, runtime, spec, solves=True) if has_solution else None
    return TaskCheck(row["name"], oracle, await _play(task, runtime, spec, solves=False))


async def _play(task: HarborTask, runtime: Runtime, spec: SandboxSpec, *, solves: bool) -> Reward:
    sandbox = await runtime.start(task.apply_task_to_sandbox_spec(spec))
    try:
        await task.prepare(sandbox)
        if solves:
            await task.run_solution_script(sandbox)
        return await task.run_tests(sandbox)
    finally:
        await sandbox.stop()
