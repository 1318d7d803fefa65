"""Isolated workers: visible files, reachable hosts, start and end."""

import asyncio
import importlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal_hpc.agents.gym_agents import GymAgent, McpAgent, OpenEnvAgent, VerifiersAgent
from areal_hpc.agents.gym_worker import WORKERS_DIR
from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.isolated_worker import WORKER_LOOP_FILE, WorkerSettings, open_worker_command
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.sandbox import SandboxSpec
from areal_hpc.sandbox.session_forwarder import HostForwarder
from tests.support.commands import write_program
from tests.support.deadlines import scaled

REWARD = "areal_hpc.reward.gsm8k.gsm8k_reward_fn"


def read_variables(
    hosts: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Read the variables of an isolated worker."""
    settings = WorkerSettings(hosts=hosts)
    with open_worker_command([WORKER_LOOP_FILE], settings, variables=variables) as command:
        args = command["args"]
    places = [index for index, argument in enumerate(args) if argument == "--setenv"]
    return {args[index + 1]: args[index + 2] for index in places}


@pytest.mark.parametrize(
    ("hosts", "variables", "direct"),
    [
        (("api.example.com:443",), {}, "127.0.0.1,localhost"),
        (("127.0.0.1:80",), {}, "localhost"),  # of the node
        (("api.example.com:443",), {"NO_PROXY": "", "no_proxy": ""}, ""),
    ],
)
def test_a_gym_reaches_servers_of_its_own_without_the_proxy(
    hosts: tuple[str, ...], variables: dict[str, str], direct: str
) -> None:
    environment = read_variables(hosts, variables)
    assert (environment["NO_PROXY"], environment["no_proxy"]) == (direct, direct)
    assert environment["HTTPS_PROXY"].startswith("http://127.0.0.1:")


def test_a_worker_has_the_variables_that_programs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"LD_LIBRARY_PATH": "/usr/lib/x", "LC_ALL": "C", "SSL_CERT_DIR": "/usr/share/x"}
    for name, value in (passed | {"SSL_CERT_FILE": "/not/shown.pem", "SECRET": "s"}).items():
        monkeypatch.setenv(name, value)
    environment = read_variables()
    assert passed.items() <= environment.items()
    assert not {"SECRET", "SSL_CERT_FILE"} & environment.keys()  # a client would not find the file


@pytest.mark.parametrize("is_python_path", [False, True])
def test_a_folder_that_cannot_be_shown_is_named(
    is_python_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder, reason in ((tmp_path / "missing", "is no folder"), (tmp_path, "your home")):
        variables = {"PYTHONPATH": str(folder)} if is_python_path else {}
        opened = open_worker_command(
            [WORKER_LOOP_FILE],
            WorkerSettings(),
            variables=variables,
            readonly_folders=() if is_python_path else [str(folder)],
        )
        with pytest.raises(RecipeError, match=f"{folder} cannot be shown.*{reason}"), opened:
            pass


def test_hosts_are_checked_and_known_as_the_forwarder_knows_them() -> None:
    for hosts in (["API.example.com:443"], ["[::1]:8000"]):
        agent = GymAgent("x.py", {}, hosts=hosts)
        assert list(agent._hosts) == [hosts[0].lower()]
    for kind, kwargs in (
        (GymAgent, {"script": "x.py", "config": {}}),
        (VerifiersAgent, {"taskset": {"id": "x"}}),
    ):
        for host in ("example.com", "https://example.com", "example.com:80/a", "a:port", ":80", ""):
            with pytest.raises(RecipeError, match="HOST:PORT") as caught:
                kind(**kwargs, hosts=[host])
            assert caught.value.problems[0].key == "rollout.workflow_kwargs.hosts"
    with pytest.raises(RecipeError, match="'shop' is no URL") as caught:
        McpAgent({"shop": {"url": "shop"}}, REWARD)
    assert caught.value.problems[0].key == "rollout.workflow_kwargs.servers.shop.url"
    with pytest.raises(RecipeError, match="'shop' is no URL"):
        OpenEnvAgent("shop")
    assert McpAgent({"shop": {"url": "http://[::1]/mcp"}}, REWARD)._hosts == ("[::1]:80",)


@pytest.mark.parametrize(
    "request_line",
    [b"GET http://host:80/a", b"CONNECT host:80", b"GET", b"GET http://host:80/a b c"],
)
@pytest.mark.asyncio
async def test_a_request_that_is_none_is_answered(request_line: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    forwarder = HostForwarder(listener, ["host:80"])
    await forwarder.start()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(request_line + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), scaled(20))
    writer.close()
    await forwarder.close()
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_tool_server_of_a_command_knows_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WORKER_LOOP_FILE.parent))
    monkeypatch.syspath_prepend(str(WORKERS_DIR))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:8998")
    monkeypatch.setenv("no_proxy", "localhost")
    gym = importlib.import_module("mcp_worker").McpGym({"servers": {}, "call_timeout_s": 1.0})
    config = {"command": ["server"], "env": {"no_proxy": "own", "A": "b"}}
    target = asyncio.run(gym._build_connection_target(config))
    wanted = {"HTTPS_PROXY": "http://127.0.0.1:8998", "no_proxy": "own", "A": "b"}
    assert wanted.items() <= target.env.items()


def test_sockets_of_a_machine_with_loopback_alone_are_not_a_process_s() -> None:
    program = (
        "import os, socket\n"
        "from areal_hpc.sandbox.memory import measure_memory_bytes\n"
        "before = measure_memory_bytes([os.getpid()], 1 << 40)\n"
        "held = [socket.socket() for _ in range(800)]\n"
        "print(measure_memory_bytes([os.getpid()], 1 << 40) - before)\n"
    )
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", program]
    grown = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert grown < 50 << 20


@pytest.mark.parametrize(
    ("isolation", "name"), [("podman", "a:ro"), ("apptainer", "a:ro"), ("apptainer", "a,b")]
)
def test_a_folder_whose_path_would_be_split_is_refused_by_name(
    isolation: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("podman", "crun", "apptainer"):
        write_program(tmp_path / program, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / name
    folder.mkdir()
    spec = SandboxSpec(readonly_folders=(str(folder),))
    with pytest.raises(RecipeError) as refused:
        asyncio.run(make_runtime(isolation).start(spec))
    (problem,) = refused.value.problems
    assert f"cannot show {folder}: expected a path without" in problem.message
    assert problem.key == "rollout.agent.isolation"
