"""The processes that are compared, each started on a core of its own."""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks._http_load import Address, load
from benchmarks._proxy_texts import Dialogue, Message

CHECKOUT = Path(__file__).parents[1]
LITELLM = "litellm[proxy]==1.106.2"
LITELLM_START_S = 120.0
CORES = sorted(os.sched_getaffinity(0))


class Process:
    """Child process that prints its port; measured ones have the first core, others the last."""

    def __init__(self, argv: Sequence[str], log: Path, *, core: int, **env: str) -> None:
        with log.open("ab") as stream:
            self._child = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        os.sched_setaffinity(self._child.pid, {core})
        self._log = log

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def line(self) -> str:
        """Read the next line of its output."""
        assert self._child.stdout is not None
        if line := self._child.stdout.readline():
            return line
        raise RuntimeError(self._log.read_text()[-2000:])

    def stop(self) -> None:
        self._child.terminate()
        self._child.wait(60)
        assert self._child.stdout is not None
        self._child.stdout.close()


class Side:
    """One of the things that are compared."""

    name: str
    path: str
    extra: bytes = b""
    """Added to each request's JSON."""

    def __init__(self, process: Process, address: Address) -> None:
        self.process = process
        self.address = address

    async def conversations(
        self, dialogues: Sequence[Dialogue], turns: int, reply: Message
    ) -> list[list[bytes]]:
        """The requests that are timed; without sessions each stands alone."""
        return [
            [self.request(dialogue.messages(turn, reply), "none")]
            for dialogue in dialogues
            for turn in range(1, turns + 1)
        ]

    def request(self, messages: list[Message], key: str) -> bytes:
        body = msgspec.json.encode({"messages": messages, "model": "bench", "max_tokens": 256})
        return self.address.request(self.path, body[:-1] + self.extra + b"}", key)


class Direct(Side):
    """No proxy at all."""

    name = "upstream, direct"
    path = "/generate"


class Floor(Side):
    """Relay of bytes on the proxy's libraries."""

    name = "floor: raw relay"
    path = "/"


class Ours(Side):
    """The proxy, recording into a journal."""

    name = "areal-hpc proxy"
    path = "/v1/chat/completions"

    def __init__(self, process: Process, address: Address, admin_key: str) -> None:
        super().__init__(process, address)
        self.admin_key = admin_key

    async def conversations(
        self, dialogues: Sequence[Dialogue], turns: int, reply: Message
    ) -> list[list[bytes]]:
        """Open a session for each dialogue, and build the requests that follow its opening."""
        body = b'{"task_id":"bench"}'
        opening = self.address.request("/rl/start_session", body, self.admin_key)
        opened = await load(self.address, [[opening] for _ in dialogues], 32)
        keys = [msgspec.json.decode(answer)["api_key"] for (answer,) in opened.answers]
        pairs = list(zip(dialogues, keys, strict=True))
        first = [[self.request(dialogue.messages(0, reply), key)] for dialogue, key in pairs]
        await load(self.address, first, 32)
        return [
            [self.request(dialogue.messages(turn, reply), key) for turn in range(1, turns + 1)]
            for dialogue, key in pairs
        ]


class LiteLLM(Side):
    """One worker without database, keys or logging. It neither tokenizes nor records."""

    name = "LiteLLM, no log-probs"
    path = "/v1/chat/completions"


class LiteLLMLogprobs(LiteLLM):
    """LiteLLM with log-probabilities in its replies, in the same process."""

    name = "LiteLLM, log-probs"
    extra = b',"logprobs":true'


def start_server(
    name: str, argument: str, log: Path, *, core: int, reply_s: float = 0.0
) -> tuple[Process, Address]:
    """Start one of `benchmarks._proxy_servers`; the upstream answers after `reply_s`."""
    argv = [sys.executable, "-m", "benchmarks._proxy_servers", name, argument, str(reply_s)]
    process = Process(argv, log, core=core)
    return process, Address("127.0.0.1", int(process.line()))


def start_ours(upstream: Address, model_dir: Path, folder: Path) -> Ours:
    """The proxy with a journal in `folder`."""
    key_file = folder / "admin.key"
    argv = [
        *(sys.executable, "-m", "areal_hpc", "proxy", "--port", "0"),
        *("--upstream", f"http://{upstream.host}:{upstream.port}"),
        *("--tokenizer", str(model_dir), "--admin-key-file", str(key_file)),
        *("--journal", str(folder / "journal")),
    ]
    process = Process(argv, folder / "proxy.log", core=CORES[0])
    port = int(process.line().partition(",")[0].rpartition(":")[2])
    for _ in range(3):
        process.line()
    return Ours(process, Address("127.0.0.1", port), key_file.read_text())


def litellm_python() -> Path:
    """The interpreter of LiteLLM's own environment, made if it is missing."""
    folder = CHECKOUT / ".venvs" / "litellm"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.read_text() != LITELLM:
        print(f"making {folder} with {LITELLM}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", LITELLM]
        subprocess.run(pip, check=True)
        stamp.write_text(LITELLM)
    return folder / "bin" / "python"


def start_litellm(upstream: Address, folder: Path, port: int) -> tuple[LiteLLM, LiteLLMLogprobs]:
    """Start LiteLLM's proxy, and return both of its sides."""
    python = litellm_python()
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: bench\n  litellm_params:\n    model: openai/bench\n"
        f"    api_base: http://{upstream.host}:{upstream.port}/v1\n    api_key: none\n"
    )
    argv = [
        *(str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"),
        *("--port", str(port), "--num_workers", "1", "--telemetry", "False"),
    ]
    env = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the internet
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # the easiest work for it
    }
    process = Process(argv, folder / "litellm.log", core=CORES[0], **env)
    give_up_at = time.monotonic() + LITELLM_START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).close()
            break
        except OSError:
            if time.monotonic() > give_up_at or not process.is_alive:
                process.stop()
                raise RuntimeError((folder / "litellm.log").read_text()[-2000:]) from None
            time.sleep(0.5)
    address = Address("127.0.0.1", port)
    return LiteLLM(process, address), LiteLLMLogprobs(process, address)
