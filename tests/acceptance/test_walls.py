"""Breaks by the attacks of `tests/support/attacks/tool.py` where their walls are taken away.

Else an attack would prove nothing. With bubblewrap, without a run: an attack's targets lie in a
folder of the sandbox's user, as they do in a run of an ordinary user. Findings go to
`benchmarks/results/walls.json`, which docs/attacks.md shows.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.sandbox import bwrap, channel, guest
from areal_hpc.sandbox.guest import NOBODY_UID, WORK_DIR, may_become_nobody
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.sandbox import Network, Sandbox, SandboxLimits, SandboxSpec
from tests.support.attacks import agent, tool
from tests.support.deadlines import scaled
from tests.support.gym_stage import GymStage
from tests.support.results import add_results

pytestmark = pytest.mark.timeout(300)

MEMORY_MIB = 128
MANY = 1 << 40
RUN_WORDS = "areal_hpc.trainer"


class Scene(agent.Hostile):
    """Sandbox with the targets of an attack, and changes to it before it starts."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.run_dir, home = folder / "run", folder / "home"
        super().__init__(str(folder / "note.jsonl"), str(self.run_dir), str(home))
        self.common = folder / "common"
        self.limits = SandboxLimits(
            MEMORY_MIB << 20, agent.PROCESSES, agent.DISK_MIB << 20, agent.FILES, 1 << 16
        )
        self.variables: Mapping[str, str] = {}
        self.network: Network = "none"
        self.edit_options: Callable[[list[str]], list[str]] = list
        self.key = self.admin_key = self.endpoint = self.engine = ""
        self.target = 0

    def _collect_facts(self, daemon: str) -> Mapping[str, Any]:
        return {
            **super()._collect_facts(daemon),
            "keys": [str(self.run_dir / "key")],
            "records": [str(self.run_dir / "records")],
            "answers": [str(self.run_dir / "answers")],
            "pids": [self.target],
            "memory_mib": MEMORY_MIB,
        }

    def prepare(self) -> None:
        """Make the targets of attacks; all belong to the sandbox's user."""
        for name in ("key", "records", "answers"):
            (self.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (self.run_dir / name).write_text(name)
        self.common.mkdir(mode=0o777)
        self._collect_facts("")
        user = NOBODY_UID if may_become_nobody() else os.geteuid()
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, -1)
        build = bwrap.build_guest_options

        def build_changed(*arguments: Any) -> list[str]:
            return self.edit_options(build(*arguments))

        self.patch.setattr(bwrap, "build_guest_options", build_changed)
        self.patch.setattr(agent, "OUTLASTED_TIMEOUT_S", 3.0)
        self.patch.setattr(agent, "DAEMON_GONE_AFTER_S", 1.0)

    async def attack(self, name: str) -> str:
        """Play an attack, and return the names of what it broke; empty if it held."""
        spec = SandboxSpec(network=self.network, limits=self.limits, variables=self.variables)
        sandbox = await make_runtime("bwrap").start(spec)
        try:
            if self.endpoint:
                url = await sandbox.open_model_endpoint(self.endpoint)
                sandbox.add_variables({"OPENAI_BASE_URL": url, "OPENAI_API_KEY": self.key})
            await asyncio.wait_for(self._play(name, sandbox), scaled(40))
        except TimeoutError:
            return "it was not killed"
        finally:
            await sandbox.stop()
        await asyncio.sleep(1.5)  # what it left is looked for
        reports = [json.loads(line) for line in self._note.read_text().splitlines()]
        broke = [str(what) for row in reports for what in row["broke"]]
        if any(self.common.iterdir()):
            broke.append("what it made is left on this machine")
        return (broke or [""])[0]

    def _look_for(self, name: str, daemon: str) -> None:
        super()._look_for(name, daemon)
        for pid in tool.processes():
            if agent._is(pid, daemon):
                os.kill(int(pid), signal.SIGKILL)

    def edit_tool(self, before: str, after: str) -> None:
        """Have the attack take less of this machine."""
        edited = self.folder / "tool.py"
        edited.write_text(replace_all(agent.TOOL.read_text(), before, after))
        self.patch.setattr(agent, "TOOL", edited)

    def edit_server(self, script: str, before: str, after: str) -> None:
        folder = self.folder / "server"
        folder.mkdir()
        for path in guest.SERVER_SCRIPTS:
            shutil.copy(path, folder)
        text = (folder / script).read_text()
        (folder / script).write_text(replace_all(text, before, after))
        scripts = tuple(folder / path.name for path in guest.SERVER_SCRIPTS)
        self.patch.setattr(guest, "SERVER_SCRIPTS", scripts)


def replace_all(text: str, before: str, after: str) -> str:
    assert before in text
    return text.replace(before, after)


def insert_options(scene: Scene, *added: str) -> None:
    def insert(options: list[str]) -> list[str]:
        index = options.index("--remount-ro")
        return [*options[:index], *added, *options[index:]]

    scene.edit_options = insert


def show_run(scene: Scene) -> None:
    insert_options(scene, "--bind", str(scene.folder), str(scene.folder))


def share_folder(scene: Scene) -> None:
    insert_options(scene, "--bind", str(scene.common), WORK_DIR)


def share_network(scene: Scene) -> None:
    insert_options(scene, "--share-net")


def share_processes(scene: Scene) -> None:
    def edit(options: list[str]) -> list[str]:
        text = "\0".join(options).replace("\0--as-pid-1", "")
        others = "\0".join(f"--unshare-{name}" for name in ("ipc", "net", "uts", "cgroup-try"))
        text = text.replace("--unshare-all", others)
        return text.replace("--proc\0/proc", "--ro-bind\0/proc\0/proc").split("\0")

    scene.edit_options = edit


def share_processes_and_forget_them(scene: Scene) -> None:
    share_processes(scene)
    scene.patch.setattr(Sandbox, "_kill_process_tree", lambda sandbox: sandbox._process.kill())
    scene.edit_server(
        "command_server.py", "while children := list_children", "while 0 and list_children"
    )


def make_server_writable(scene: Scene) -> None:
    def edit(options: list[str]) -> list[str]:
        index = options.index(f"{guest.GUEST_DIR}/command_server.py") - 4
        text = "\0".join([*options[:index], "--perms", "0666", "--file", *options[index + 3 :]])
        return text.replace(f"--remount-ro\0{guest.GUEST_DIR}\0", "").split("\0")

    scene.edit_options = edit


def pass_environment(scene: Scene) -> None:
    scene.variables = {"SLURM_JWT": "token", "RUN_DIR": str(scene.run_dir)}


def allow_calls(scene: Scene) -> None:
    scene.patch.setattr(guest, "build_seccomp_filter", lambda: None)
    scene.edit_tool("LIBC.ptrace(0, 0, 0, 0)", "-1")  # its sandbox would end


def end_politely(scene: Scene) -> None:
    scene.edit_server("command_server.py", "signal.SIGKILL", "signal.SIGTERM")
    scene.patch.setattr(channel, "KILL_COMMAND_TIMEOUT_S", 600.0)


def leave_server_open(scene: Scene) -> None:
    scene.edit_server("command_server.py", "_PR_SET_DUMPABLE, 0", "_PR_SET_DUMPABLE, 1")


def read_anything(scene: Scene) -> None:
    scene.edit_server("sandbox_files.py", "if not stat.S_ISREG", "if False and stat.S_ISREG")


def allow_processes(scene: Scene) -> None:
    scene.limits = replace(scene.limits, processes=100_000, memory_bytes=MANY)
    scene.edit_tool("count > 5000", "count > 200")
    scene.edit_tool("count < 20_000", "count < 200")


def allow_memory(scene: Scene) -> None:
    scene.limits = replace(scene.limits, memory_bytes=MANY)


def forget_memory(scene: Scene) -> None:
    async def watch_nothing(sandbox: Sandbox) -> None:
        await asyncio.sleep(0)

    scene.patch.setattr(Sandbox, "_kill_when_over_limits", watch_nothing)


def allow_disk(scene: Scene) -> None:
    scene.limits = replace(scene.limits, disk_bytes=1 << 30)


def allow_files(scene: Scene) -> None:
    scene.limits = replace(scene.limits, files=1_000_000)


def allow_output(scene: Scene) -> None:
    scene.limits = replace(scene.limits, output_bytes=1 << 30)
    scene.edit_tool("while True:\n        os.write(1", "for _ in '1234':\n        os.write(1")


def hand_out_admin_key(scene: Scene) -> None:
    scene.key = scene.admin_key


def lead_to_engine(scene: Scene) -> None:
    scene.endpoint = scene.engine


WALLS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    **dict.fromkeys(
        (
            *("1 admin key", "3 records", "4 write the run", "5 login files", "6 answers"),
            "27 planted files",
        ),
        ("a file system of its own", show_run),
    ),
    "7 judge": ("what the server runs is read-only", make_server_writable),
    **dict.fromkeys(("8 network", "9 sockets"), ("a network of its own", share_network)),
    **dict.fromkeys(
        ("2 run directory", "10 Slurm", "11 environment"),
        ("variables that are named", pass_environment),
    ),
    **dict.fromkeys(("12 processes", "13 process list"), ("processes of its own", share_processes)),
    "14 daemon": (
        "processes of its own, and the end of all that it started, by driver and server",
        share_processes_and_forget_them,
    ),
    "15 stubborn process": (
        "SIGKILL, and the end of a sandbox whose command outlives it",
        end_politely,
    ),
    **dict.fromkeys(
        ("16 fork bomb", "16 threads"), ("a number of processes, and memory", allow_processes)
    ),
    "17 one process": ("memory of one process, and of all", allow_memory),
    "17 many processes": ("memory of all processes", forget_memory),
    **dict.fromkeys(("17 files in memory", "18 /dev/shm"), ("size of its folders", allow_disk)),
    **dict.fromkeys(
        ("18 many files", "18 sparse file and links"), ("a number of files and links", allow_files)
    ),
    **dict.fromkeys(
        ("19 odd folders", "28 earlier episode"), ("folders that end with it", share_folder)
    ),
    "20 result paths": ("regular files alone are read", read_anything),
    "21 output": ("a size of what is printed", allow_output),
    "22 channel": ("the server's memory is out of reach", leave_server_open),
    "23 reward": ("a key for model calls alone", hand_out_admin_key),
    **dict.fromkeys(
        ("24 forged turns", "25 model route"), ("an endpoint that is the proxy", lead_to_engine)
    ),
    "26 system calls": ("a filter of system calls", allow_calls),
}
ASKS_PROXY = ("23 reward", "24 forged turns", "25 model route")
TWICE = ("28 earlier episode",)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder outside /tmp, which a sandbox has of its own."""
    folder = Path(tempfile.mkdtemp(prefix="areal-walls-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)  # shutil fails at a depth of thousands


def play(name: str, folder: Path, take_away: Callable[[Scene], None] | None) -> str:
    """Play an attack, with its wall or without, and return the names of what it broke."""
    folder.mkdir(mode=0o755)
    with contextlib.ExitStack() as opened:
        scene = Scene(folder, opened.enter_context(pytest.MonkeyPatch.context()))
        user = NOBODY_UID if may_become_nobody() else None
        words = ["/bin/sh", "-c", f"sleep 600; : {scene.run_dir} {RUN_WORDS}"]
        target = subprocess.Popen(words, user=user, start_new_session=True)
        opened.callback(target.wait)
        opened.callback(os.killpg, target.pid, signal.SIGKILL)
        scene.target = target.pid
        if name in ASKS_PROXY:
            (folder / "stage").mkdir()
            stage = opened.enter_context(closing(GymStage(folder / "stage", ["no"])))
            scene.network, scene.endpoint = "session-only", stage.proxy.url
            scene.engine, scene.admin_key = stage.server.url, stage.proxy.key_file.read_text()
            session = {"task_id": "attack", "rights": "calls"}
            scene.key = stage.proxy.post("/rl/start_session", session).json()["api_key"]
        scene.prepare()
        for listener in scene._listeners:
            opened.enter_context(listener)
        if take_away is not None:
            take_away(scene)
        if name in TWICE:
            asyncio.run(scene.attack(name))
        return asyncio.run(scene.attack(name))


@pytest.mark.parametrize("name", WALLS)
def test_an_attack_breaks_without_its_wall_alone(name: str, folder: Path) -> None:
    wall, take_away = WALLS[name]
    assert play(name, folder / "whole", None) == ""
    broke = play(name, folder / "open", take_away)
    assert broke
    finding = broke.replace(str(folder / "open"), "").partition(": b'")[0]
    finding = re.sub(r"\d{4,}$|^\d{4,}(?= lives)|[0-9a-f]{16}", "N", finding)  # ports, processes
    add_results("walls", **{name: {"wall": wall, "without": finding[:100]}})


def test_each_attack_has_a_wall() -> None:
    assert WALLS.keys() == tool.ATTACKS.keys()
