"""Worker processes of gyms play an episode each, are used again, and end with the test."""

import asyncio
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.agents.gym_agents import GymAgent, McpAgent, OpenEnvAgent
from areal_hpc.agents.gym_worker import GymWorker
from areal_hpc.errors import AgentError, ArealError, NodeResourceShortageError, RecipeError
from areal_hpc.jobs.processes.line_workers import WorkerPool
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.sandbox.isolated_worker import WorkerSettings
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.gym_stage import GymStage
from tests.support.json_server import JsonHandler, serving_http
from tests.support.process_commands import alive
from tests.support.waiting import wait_for

WORKER = str(Path(__file__).with_name("counting_worker.py"))
Gyms = WorkerPool[GymWorker]
VARIABLES = {"COLOR": "blue"}


def build_pool(
    config: Mapping[str, Any],
    size: int = 1,
    variables: Mapping[str, str] | None = None,
    settings: WorkerSettings | None = None,
) -> Gyms:
    settings = settings or WorkerSettings()
    start = partial(GymWorker.start, sys.executable, WORKER, config, variables or {}, (), settings)
    return WorkerPool(size, start)


def run(scene: Callable[[Gyms], Awaitable[None]], size: int = 2, **config: Any) -> None:
    async def play() -> None:
        workers = build_pool(config, size, variables=VARIABLES)
        try:
            await scene(workers)
        finally:
            workers.close_idle_workers()

    asyncio.run(asyncio.wait_for(play(), scaled(60)))


async def reset(worker: GymWorker, variables: Sequence[str] = ("COLOR",)) -> tuple[int, int]:
    """Return the number of the worker's episode, and its process."""
    state = await worker.request({"do": "reset", "task": {"seed": 3}}, 30)
    assert state["text"].endswith(f", {[*variables]}, {{'seed': 3}}")
    numbers = re.findall(r"\d+", state["text"])
    return int(numbers[0]), int(numbers[1])


async def step(worker: GymWorker, text: str, timeout_s: float | None = None) -> dict[str, Any]:
    return await worker.request(
        {"do": "step", "reply": {"text": text, "calls": []}}, timeout_s or scaled(30)
    )


def test_a_worker_plays_one_episode_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier process of an episode plays the next one."""
    monkeypatch.setenv("SECRET", "s")

    async def scene(workers: Gyms) -> None:
        async with workers.acquire() as worker, workers.acquire() as other:
            assert worker is not other
            assert (await reset(worker))[0] == (await reset(other))[0] == 1
            assert (await step(worker, "go"))["reward"] == 1.0
            first, used = await reset(worker), worker
        async with workers.acquire() as again, workers.acquire() as other:
            same = again if again is used else other
            count, pid = await reset(same)
            assert (count, pid != first[1]) == (1, True)

    run(scene)


@pytest.mark.parametrize(
    ("text", "kind", "message", "stays"),
    [
        ("fail", AgentError, "ValueError: not that", True),
        ("nan", AgentError, "ValueError: Out of range float", True),
        ("run short", NodeResourceShortageError, "RuntimeError: no tool server", False),
        ("leave", AgentError, "its process has ended", True),
        ("sleep", AgentError, "did not answer within 0.5 s", False),
    ],
)
def test_a_gym_that_fails_costs_its_episode(
    text: str, kind: type[ArealError], message: str, stays: bool
) -> None:
    async def scene(workers: Gyms) -> None:
        earlier = {*psutil.Process().children()}
        async with workers.acquire() as worker:
            (process,) = {*psutil.Process().children()} - earlier
            await reset(worker)
            with pytest.raises(kind, match=message):
                await step(worker, text, 0.5 if text == "sleep" else None)
            assert (await step(worker, "go")) == {} if stays else not worker.is_usable
        assert process.is_running() == stays
        async with workers.acquire() as next_one:
            assert (await reset(next_one))[0] == 1

    run(scene, size=1)


def test_nothing_of_an_episode_meets_a_later_one_or_the_user(tmp_path: Path) -> None:
    """Its processes, files and changes go; secrets, the user's files and networks stay hidden."""
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    attack = (
        "import os, pathlib, socket, subprocess\n"
        "import worker_loop\n"
        "worker_loop.reseed = None\n"
        "subprocess.Popen(['/bin/sleep', '3600'], start_new_session=True)\n"
        "pathlib.Path('/tmp/planted').write_text('x')\n"
        "tried = []\n"
        f"for path in ({str(secret)!r}, {str(CHECKOUT / 'Makefile')!r}, '/etc/passwd', "
        "'/proc/1/environ'):\n"
        "    try: tried.append(open(path).read())\n"
        "    except OSError: pass\n"
        "for name in ('/usr/x', '/sandbox/x', os.__file__):\n"
        "    try: open(name, 'a'); tried.append(name)\n"
        "    except OSError: pass\n"
        "for target in ((socket.AF_INET, ('1.1.1.1', 53)), (socket.AF_UNIX, '/dev/log')):\n"
        "    try: socket.socket(target[0]).connect(target[1]); tried.append(target)\n"
        "    except OSError: pass\n"
        "for pid in (1, os.getppid()):\n"
        "    try: open(f'/proc/{pid}/mem', 'r+b'); tried.append(pid)\n"
        "    except OSError: pass\n"
        "os.kill(1, 9)\n"
        "opened = [pathlib.Path('/proc/self/fd', one) for one in os.listdir('/proc/self/fd')]\n"
        "opened = [one for one in opened if one.is_socket()]\n"
        "if len(opened) != 3: tried.append(len(opened))  # to its parent, and asyncio's pair\n"
        "found = [tried, sorted(os.environ), os.listdir('/tmp'),\n"
        "    sorted(p for p in os.listdir('/proc') if p.isdigit())]\n"
    )
    clean = (
        "import os\n"
        "processes = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "found = [sorted(os.listdir('/tmp')), processes]\n"
    )

    async def scene(workers: Gyms) -> None:
        async with workers.acquire() as worker:
            await reset(worker)
            tried, variables, _, processes = (await step(worker, attack))["found"]
            assert tried == []
            own = {"HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS", "PATH", "PWD", "TZ"}
            own |= {"LD_LIBRARY_PATH", "SSL_CERT_DIR", "SSL_CERT_FILE"}
            assert {"COLOR"} <= set(variables) <= {"COLOR", *own}
            assert len(processes) == 3
            await worker.request({"do": "close"}, 30)
            _, later = await reset(worker)
            # The Python that the worker sees may lie in /tmp, as that of a checkout there.
            shown = {Path(folder) for folder in (sys.prefix, sys.base_prefix)}
            shown_in_tmp = sorted({folder.parts[2] for folder in shown if folder.parts[1] == "tmp"})
            assert (await step(worker, clean))["found"] == [shown_in_tmp, ["1", str(later)]]

    run(scene, size=1)


def test_a_program_that_a_gym_starts_can_be_ended() -> None:
    asks = (
        "import signal, subprocess\n"
        "found = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    program = subprocess.Popen(['/bin/sleep', '3600'])\n"
        "    program.send_signal(number)\n"
        f"    found.append(program.wait({scaled(10)}))\n"
    )

    async def scene(workers: Gyms) -> None:
        async with workers.acquire() as worker:
            await reset(worker)
            assert (await step(worker, asks))["found"] == [-signal.SIGTERM, -signal.SIGINT]

    run(scene, size=1)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_an_episode_ends_with_its_worker_where_nothing_is_isolated(
    is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of the episode end too when the worker is closed."""
    monkeypatch.setitem(globals(), "WORKER", str(shutil.copy(WORKER, tmp_path)))
    (tmp_path / "math.py").write_text("raise SystemExit('a module of Python has this name')")
    monkeypatch.setenv(ISOLATION_VARIABLE, "none")
    monkeypatch.setenv("XDG_DATA_HOME", "/passed")
    asks = (
        "import asyncio, os, subprocess, time\n"
        "program = subprocess.Popen(['/bin/sleep', '3600'], start_new_session=True)\n"
        "asyncio.get_running_loop().call_soon(time.sleep, 3600)  # it hears nothing\n"
        "found = [os.getppid(), os.getpid(), program.pid, os.environ.get('XDG_DATA_HOME')]\n"
    )
    processes = list[psutil.Process]()

    async def scene(workers: Gyms) -> None:
        async with workers.acquire() as worker:
            await reset(worker)
            *pids, passed = (await step(worker, asks))["found"]
            assert passed == "/passed"
            processes.extend(map(psutil.Process, pids))
            if not is_closed:
                processes[0].kill()
                wait_for(lambda: not alive(processes[:2]), 20)

    try:
        run(scene, size=1)
        wait_for(lambda: not alive(processes if is_closed else processes[:2]), 20)
    finally:
        for process in alive(processes):
            process.kill()


def test_a_program_that_a_gym_starts_can_give_no_answer() -> None:
    async def scene(workers: Gyms) -> None:
        async with workers.acquire() as worker:
            await reset(worker)
            state = await step(worker, "start")
            assert (state["text"], state["reward"]) == ("left 3", 1.0)
            assert (await step(worker, "go"))["text"] == "on"

    run(scene)


def test_a_gym_that_cannot_be_built_or_has_no_python_says_so() -> None:
    async def broken(workers: Gyms) -> None:
        with pytest.raises(RecipeError, match=r"cannot be built: .*no such gym"):
            async with workers.acquire():
                pass

    run(broken, is_broken=True)
    agent = GymAgent(WORKER, {}, python="/no/python")
    with pytest.raises(RecipeError, match="no Python for this gym at /no/python"):
        asyncio.run(agent.run({}, base_url="http://127.0.0.1:1/v1", api_key="k"))


class Answering(JsonHandler):
    def get(self) -> None:
        self.answer(200, self.path.encode())


def test_a_gym_reaches_the_hosts_that_are_named_and_no_other() -> None:
    asks = (
        "import urllib.request, urllib.error\n"
        "found = []\n"
        "for url in {}:\n"
        "    try: found.append(urllib.request.urlopen(url, timeout=20).read().decode())\n"
        "    except urllib.error.HTTPError as error: found.append(error.code)\n"
    )

    async def play(hosts: list[str]) -> list[Any]:
        settings = WorkerSettings(hosts=(hosts[0],))
        workers = build_pool({}, settings=settings)
        try:
            async with workers.acquire() as worker, worker.reach_hosts(hosts[:1]):
                await reset(worker, [])
                urls = [f"http://{host}/a" for host in hosts]
                answers: list[Any] = (await step(worker, asks.format(urls)))["found"]
                return answers
        finally:
            workers.close_idle_workers()

    with ExitStack() as stack:
        urls = [stack.enter_context(serving_http(Answering)) for _ in range(2)]
        hosts = [url.removeprefix("http://") for url in urls]
        assert asyncio.run(play(hosts)) == ["/a", 403]


def test_an_episode_gives_each_reply_the_reward_of_its_step(tmp_path: Path) -> None:
    with closing(GymStage(tmp_path, ["go", "go on"], parser="")) as stage:
        agent = GymAgent(WORKER, {}, variables=VARIABLES, prompt="Count.", max_turns=2)
        data = {"seed": 3, "messages": [{"role": "user", "content": "Now."}]}
        rewards = stage.play(agent, data)
    assert list(rewards.values()) == [1.0, 1.0]
    assert re.match(r"<\|im_start\|>system\nCount.*user\nNow.*episode 1 of", stage.prompts[0], 16)
    assert "go<|im_end|>\n<|im_start|>user\non<|im_end|>" in stage.prompts[1]


def test_servers_and_environments_that_are_none_are_refused() -> None:
    reward = "areal_hpc.reward.gsm8k.gsm8k_reward_fn"
    for how, message in (
        ({}, r"keys \[\]"),
        ({"url": "http://x", "command": ["y"]}, "keys"),
        ({"url": "http://x", "env": {}}, "unknown keys"),
    ):
        with pytest.raises(RecipeError, match=message):
            McpAgent({"shop": how}, reward)
    with pytest.raises(RecipeError, match="one of base_url and app"):
        OpenEnvAgent()
