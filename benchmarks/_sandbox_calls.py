"""Model calls of many episodes at once: by programs in sandboxes, and by the same without.

Programs of both sides call the real proxy, each with a session of its own; one in a sandbox has a
`session-only` network, so its bytes go through the forwarder of this process. Behind the proxy is
the scripted upstream of `benchmarks.proxy`, which answers after a while, as a model does. Rounds
run both sides, in alternating order; starts of sandboxes and of programs are not timed.
"""

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_hpc.sandbox.runtimes import Runtime, make_runtime
from areal_hpc.sandbox.sandbox import Network, Sandbox, SandboxSpec
from benchmarks._http_load import load
from benchmarks._proxy_servers import Answers
from benchmarks._proxy_sides import CORES, Ours, start_ours, start_server
from benchmarks._proxy_texts import Texts

CONTEXT_TOKENS = 1 << 14
REPLY_TOKENS = 64
GO_AFTER_S = 1.0
"""Time from the signal to the programs' first calls."""
CALLER = """
import http.client, json, os, sys, time
calls = int(sys.argv[1])
host = os.environ["OPENAI_BASE_URL"].partition("//")[2].partition("/")[0]
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": "Go on."}], "model": "bench"})
peer = http.client.HTTPConnection(host)
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
time.sleep(max(0.0, float(open("go").read()) - time.time()))
for _ in range(calls):
    peer.request("POST", "/v1/chat/completions", body, headers)
    answer = peer.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
print(time.time())
"""


async def measure_calls(
    runtime: Runtime, episodes: int, calls: int, rounds: int, reply_s: float
) -> dict[str, float]:
    """Calls a second of each side, and the median of the rounds' ratios."""
    sides = (runtime, make_runtime("none"))
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder, _start_proxy(Path(folder), reply_s) as ours:
        for number in range(-1, rounds):  # the first does not count
            for side in sides if number % 2 else reversed(sides):
                rate = await _measure_side(side, ours, episodes, calls)
                if number >= 0:
                    rates[side.name].append(rate)
    within, without = (rates[side.name] for side in sides)
    pairs = zip(within, without, strict=True)
    return {
        "calls_per_s": statistics.median(within),
        "plain_calls_per_s": statistics.median(without),
        "calls_ratio": statistics.median(a / b for a, b in pairs),
    }


async def _measure_side(runtime: Runtime, ours: Ours, episodes: int, calls: int) -> float:
    """Calls a second of all episodes together."""
    network: Network = "open" if runtime.name == "none" else "session-only"
    sandboxes = [await runtime.start(SandboxSpec(network=network)) for _ in range(episodes)]
    try:
        keys = await _open_sessions(ours, episodes)
        async with asyncio.TaskGroup() as group:
            callers = [
                group.create_task(_run_caller(sandbox, ours, key, calls))
                for sandbox, key in zip(sandboxes, keys, strict=True)
            ]
            for sandbox in sandboxes:
                await _wait_until_ready(sandbox)
            begin_at = time.time() + GO_AFTER_S
            for sandbox in sandboxes:
                await sandbox.put("going", str(begin_at))
                await sandbox.exec(["mv", "going", "go"])
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return episodes * calls / (max(caller.result() for caller in callers) - begin_at)


async def _run_caller(sandbox: Sandbox, ours: Ours, key: str, calls: int) -> float:
    """Run the program, and return the time at which it had made its calls."""
    url = await sandbox.open_model_endpoint(f"http://{ours.address.host}:{ours.address.port}")
    result = await sandbox.exec(
        ["python3", "-c", CALLER, str(calls)],
        timeout_s=600,
        variables={"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key},
    )
    if result.exit_code != 0:
        raise RuntimeError(result.text[-2000:])
    return float(result.stdout)


async def _wait_until_ready(sandbox: Sandbox) -> None:
    """Wait until the program in the sandbox is about to call."""
    while True:
        with contextlib.suppress(OSError):
            await sandbox.get("ready")
            return
        await asyncio.sleep(0.05)


async def _open_sessions(ours: Ours, count: int) -> Sequence[str]:
    opening = ours.address.request("/rl/start_session", b'{"task_id":"bench"}', ours.admin_key)
    opened = await load(ours.address, [[opening] for _ in range(count)], 32)
    return [json.loads(answer)["api_key"] for (answer,) in opened.answers]


@contextlib.contextmanager
def _start_proxy(folder: Path, reply_s: float) -> Iterator[Ours]:
    """The proxy, and the upstream behind it."""
    texts = Texts(seed=0)
    model_dir = texts.write_model_dir(folder / "model", CONTEXT_TOKENS)
    text = texts.text(REPLY_TOKENS)
    ids = [*texts.tokenizer.encode(text, add_special_tokens=False).ids, texts.eos]
    answers = Answers(text, ids, [""] * len(ids)).write(folder / "answers.json")
    log = folder / "servers.log"
    server, upstream = start_server("upstream", str(answers), log, core=CORES[-1], reply_s=reply_s)
    try:
        ours = start_ours(upstream, model_dir, folder)
        try:
            yield ours
        finally:
            ours.process.stop()
    finally:
        server.stop()
