"""Agent whose tool is hostile: each task is one attack, from within the sandbox of its episode."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_hpc.errors import SandboxLostError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.sandbox.channel import CommandResult
from areal_hpc.sandbox.guest import GUEST_VARIABLES
from areal_hpc.sandbox.sandbox import Sandbox
from slurm.devcluster.paths import DevclusterPaths
from tests.support.attacks import tool
from tests.support.attacks.refused_calls import MODEL_CALLS, SYSTEM_CALLS
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

TOOL = Path(tool.__file__)
SECRET_WORDS = {"HF_TOKEN": "hub-secret-word", "AWS_SECRET_ACCESS_KEY": "aws-secret-word"}
"""Variables of the job."""
KEPT = "areal-kept"
"""A file in each folder of the attacked machine, which stays unchanged."""
DAEMON_GONE_AFTER_S = scaled(4.0)
COMMAND_TIMEOUT_S = 600.0
"""Time limit of a command: a grammar that costs too much is refused only after a try."""
OUTLASTED_TIMEOUT_S = 20.0
MEMORY_MIB, DISK_MIB, FILES, PROCESSES = 512, 32, 3000, 40
SANDBOX = {
    "memory_bytes": MEMORY_MIB << 20,
    "disk_bytes": DISK_MIB << 20,
    "files": FILES,
    "processes": PROCESSES,
    "warm": 1,
}
HIGHEST_PID_INSIDE = 300
"""Highest id of processes that a sandbox has while an attack looks at others'."""
OUTLASTED = ("15 stubborn process",)
CUT_OFF = ("21 output",)
OUTSIDE_ADDRESSES = (("169.254.169.254", 80), ("192.0.2.1", 80), ("10.0.0.1", 443), ("::1", 22))
SERVICE_SOCKETS = (
    "/run/munge/munge.socket.2",
    "/var/run/docker.sock",
    "/run/dbus/system_bus_socket",
    "/tmp/tmux-0/default",
)


def tasks(size: int, seed: int, terms: int) -> Iterator[dict[str, Any]]:
    """List every attack; `seed` and `terms` are those of other generators."""
    for number in range(size):
        name = [*tool.ATTACKS][number % len(tool.ATTACKS)]
        yield {"messages": [{"role": "user", "content": f"{number} ="}], "attack": name}


class Hostile:
    def __init__(self, note: str, run_dir: str, home: str) -> None:
        self._note, self._paths, self._home = Path(note), RunPaths(Path(run_dir)), Path(home)
        self._listeners: list[socket.socket] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reply = await extra_kwargs["http_client"].post(
            f"{extra_kwargs['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {extra_kwargs['api_key']}"},
            json={"model": "default", "messages": data["messages"], "max_completion_tokens": 8},
        )
        assert reply.status_code == 200, reply.text
        if "attack" in data:
            await self._play(data["attack"], data["sandbox"])
        return 0.0

    async def _play(self, name: str, sandbox: Sandbox) -> None:
        daemon = f"areal-daemon-{secrets.token_hex(8)}"
        await sandbox.put("tool.py", TOOL.read_bytes())
        calls = {"model_calls": MODEL_CALLS.get(name, []), "system_calls": SYSTEM_CALLS}
        facts = json.dumps({**self._collect_facts(daemon), **calls})
        began, forks = time.monotonic(), asyncio.create_task(self._keep_forking())
        broke: list[str] = []
        held: list[str] = []
        try:
            words = ["python3", f"{sandbox.folder}/tool.py", name]
            timeout_s = OUTLASTED_TIMEOUT_S if name in OUTLASTED else COMMAND_TIMEOUT_S
            result = await sandbox.exec(words, stdin=facts, timeout_s=timeout_s)
            broke, held = self._judge(name, result)
            broke += await self._read_results(name, sandbox)
        except SandboxLostError as error:
            held = [f"the sandbox ended: {error}".partition(" while it ran")[0]]
        await asyncio.wait_for(sandbox.stop(), scaled(60))
        if forks.done():
            broke.append("another process of this machine could not be started")
        forks.cancel()
        broke += self._find_planted()
        self._tell(name, broke=broke, held=held, seconds=round(time.monotonic() - began, 2))
        asyncio.get_running_loop().call_later(DAEMON_GONE_AFTER_S, self._look_for, name, daemon)

    def _judge(self, name: str, result: CommandResult) -> tuple[list[str], list[str]]:
        lines = result.stdout.decode(errors="replace").splitlines()
        broke = [line.removeprefix("BROKE ") for line in lines if line.startswith("BROKE ")]
        held = [line.removeprefix("HELD ") for line in lines if line.startswith("HELD ")]
        if name in CUT_OFF:
            return ([], ["killed at its limit"]) if result.is_cut_off else (["endless output"], [])
        if result.timed_out and name not in OUTLASTED:
            broke.append(f"nothing is known of it: it took longer than {COMMAND_TIMEOUT_S:.0f} s")
        elif result.timed_out:
            held.append("killed at its time limit")
        elif name in OUTLASTED:
            broke.append("it was not killed")
        elif result.exit_code != 0:
            broke.append(f"the attack itself failed: {result.stderr.decode()[-500:]}")
        return broke, held

    async def _read_results(self, name: str, sandbox: Sandbox) -> list[str]:
        """List results that the attack has replaced by something else and that were read."""
        if not name.startswith("20"):
            return []
        broke = []
        for kind in ("pipe", "link", "endless", "folder", "device"):
            try:
                content = await asyncio.wait_for(sandbox.get(f"result-{kind}"), scaled(20))
                broke.append(f"result-{kind} was read: {content[:20]!r}")
            except OSError:
                continue
        return broke

    async def _keep_forking(self) -> None:
        """Start processes again and again: else the attack fails this agent's episodes."""
        while True:
            process = await asyncio.create_subprocess_exec("true")
            assert await process.wait() == 0
            await asyncio.sleep(0.5)

    def _look_for(self, name: str, daemon: str) -> None:
        left = [pid for pid in tool.processes() if _is(pid, daemon)]
        self._tell(f"{name}: later", broke=[f"{pid} lives" for pid in left], held=[], seconds=0)

    def _tell(self, name: str, **figures: Any) -> None:
        with self._note.open("a") as file:
            file.write(json.dumps({"attack": name, **figures}) + "\n")

    def _host_folders(self) -> list[Path]:
        return [self._paths.root, self._home, self._paths.shards_dir, self._paths.rendezvous_dir]

    def _find_planted(self) -> list[str]:
        folders = [*self._host_folders(), CHECKOUT, *_package_folders(), Path("/usr/lib")]
        folders += [Path("/etc"), Path("/tmp"), Path("/dev/shm")]
        planted = [str(path) for folder in folders for path in folder.glob(f"*{tool.PLANTED}*")]
        planted += [str(path) for path in self._home.rglob("*") if path.name != KEPT]
        kept = [folder / KEPT for folder in self._host_folders()]
        return planted + [f"{path} is gone" for path in kept if not path.exists()]

    def _collect_facts(self, daemon: str) -> Mapping[str, Any]:
        paths = self._paths
        slurm = _find_slurm()
        slurm_files = [str(slurm.slurm_conf), str(slurm.munge_key)] if slurm else []
        for folder in self._host_folders():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / KEPT).touch()
        return {
            "daemon": daemon,
            "run_dir": str(paths.root),
            "home": str(self._home),
            "keys": [str(paths.service_key), str(paths.admin_key), "/etc/shadow", *slurm_files],
            "records": [
                *map(str, (paths.metrics, paths.events, paths.shards_dir, paths.manifests_dir)),
                *map(str, Path("/tmp").glob("areal_hpc-*")),
            ],
            "host_folders": [str(folder) for folder in (*self._host_folders(), CHECKOUT)],
            "kept": KEPT,
            "answers": [str(paths.dataset("train")), str(CHECKOUT / "areal_hpc/reward/code.py")],
            "addresses": [
                *_list_addresses(paths.rendezvous_dir),
                *(_list_controllers(slurm) if slurm else ()),
                ("127.0.0.1", self._listen()),
                *OUTSIDE_ADDRESSES,
            ],
            "sockets": [
                str(self._home.parent / "socket"),
                *([str(slurm.munge_socket)] if slurm else []),
                *SERVICE_SOCKETS,
                f"@areal-abstract-{os.getpid()}",
            ],
            "slurm_conf": str(slurm.slurm_conf) if slurm else "",
            "variables": [*GUEST_VARIABLES, *(_ENDPOINT_VARIABLES)],
            "secret_words": [*SECRET_WORDS.values()],
            "pids": _list_targets(str(paths.root)),
            "packages": [*map(str, _package_folders())],
            "memory_mib": MEMORY_MIB,
            "disk_mib": DISK_MIB,
            "files": FILES,
        }

    def _listen(self) -> int:
        """Open a port of this machine, a socket file and an abstract one, which answer."""
        if not self._listeners:
            self._listeners = [socket.create_server(("127.0.0.1", 0))]
            self._listeners += [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
            for address, listener in zip(
                (self._home.parent / "socket", f"\0areal-abstract-{os.getpid()}"),
                self._listeners[1:],
                strict=True,
            ):
                listener.bind(str(address))
                listener.listen()
            (self._home.parent / "socket").chmod(0o777)
        return int(self._listeners[0].getsockname()[1])


_ENDPOINT_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
)


def _package_folders() -> list[Path]:
    return [Path(sysconfig.get_path("purelib")), Path(sys.prefix)]


def _find_slurm() -> DevclusterPaths | None:
    """Find the devcluster whose job this is; None outside of jobs."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return DevclusterPaths(Path(os.environ["SLURM_CONF"]).parents[1])


def _list_controllers(slurm: DevclusterPaths) -> Iterator[tuple[str, int]]:
    text = slurm.slurm_conf.read_text()
    (host,) = re.findall(r"^SlurmctldHost=\S+\((\S+)\)$", text, re.MULTILINE)
    (port,) = re.findall(r"^SlurmctldPort=(\d+)$", text, re.MULTILINE)
    yield host, int(port)


def _list_addresses(rendezvous_dir: Path) -> Iterator[tuple[str, int]]:
    """List the services of the run, SGLang's own ports among them."""
    for path in rendezvous_dir.glob("*.json"):
        with contextlib.suppress(KeyError, ValueError):
            address = json.loads(path.read_bytes())["url"].rpartition("/")[2]
            host, _, port = address.partition(":")
            yield host, int(port)
    listening = subprocess.run(["ss", "-Htln"], capture_output=True, text=True, check=False)
    for line in listening.stdout.splitlines():
        port = line.split()[3].rpartition(":")[2]
        if port.isdecimal():
            yield "127.0.0.1", int(port)


def _list_targets(run_dir: str) -> list[int]:
    """List this process, others of the run, and those of Slurm that started it.

    Sandboxes give low numbers to processes of their own.
    """
    pids = [os.getpid()]
    for pid in tool.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if run_dir.encode() in words or words.startswith(b"slurmstepd"):
                pids.append(int(pid))
    targets = [pid for pid in pids if pid > HIGHEST_PID_INSIDE]
    assert targets, f"all of {pids} could be processes of a sandbox"
    return targets


def _is(pid: str, name: str) -> bool:
    with contextlib.suppress(OSError):
        return name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
