"""The recording proxy against a bare relay and against LiteLLM's proxy, before one upstream.

The upstream is scripted and fast: it says the same 256 tokens with their log-probabilities to
everybody. What lies between it and the load:

- floor: uvicorn's raw ASGI and aiohttp passing bytes on; what our libraries cost by themselves.
- areal-hpc proxy: a session per conversation, every turn extends the one before by 120 tokens, and
  is spliced, tokenized, recorded in the tree and in the journal on disk.
- LiteLLM: one worker without database, keys or logging, installed into an environment of its own
  at the first run. It tokenizes and records nothing. `litellm_over_ours_*` compares with LiteLLM
  passing the log-probabilities on; `litellm_plain_over_ours_*` with it being spared them.

Every round runs all sides interleaved, our proxy in a fresh process; figures are medians over the
rounds. CPU is that of the process tree, user and system. Headline figures are those at 32
concurrent calls. Measured processes have one core, load and upstream another.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks._http_load import cpu_s, load
from benchmarks._pairs import add_out, report
from benchmarks._proxy_servers import Answers
from benchmarks._proxy_sides import (
    CORES,
    LITELLM,
    Direct,
    Floor,
    LiteLLM,
    LiteLLMLogprobs,
    Ours,
    Process,
    Side,
    start_litellm,
    start_ours,
    start_server,
)
from benchmarks._proxy_texts import REPLY_TOKENS, Dialogue, Message, Texts

SIZES = {"1k": 1000, "8k": 8000}
TURNS = 4
DIALOGUES = {1: 32, 32: 64, 256: 256}
"""Conversations by how many are held at once."""
LITELLM_DIALOGUES = {1: 4, 32: 24, 256: 64}
CONTEXT_TOKENS = 1 << 16
LONG_TURNS = 64
LONG_DIALOGUES = 16


@dataclass(frozen=True, slots=True)
class Sample:
    cpu_us: float
    """Per request."""
    p50_ms: float
    p99_ms: float
    requests_per_s: float


Point = tuple[str, str, int]
"""(side, size, concurrency)."""


class Bench:
    """The parts that last for all rounds."""

    def __init__(self, folder: Path, share: float) -> None:
        self._folder = folder
        self._share = share
        self._processes: list[Process] = []
        texts = Texts(seed=0)
        self.model_dir = texts.write_model_dir(folder / "model", CONTEXT_TOKENS)
        self.reply, answers = _reply(texts)
        self._dialogues: dict[str, list[Dialogue]] = {
            size: [texts.dialogue(tokens, TURNS) for _ in range(self._count(DIALOGUES[256]))]
            for size, tokens in SIZES.items()
        }
        self.long = [texts.dialogue(0, LONG_TURNS) for _ in range(self._count(LONG_DIALOGUES))]
        log = folder / "servers.log"
        written = answers.write(folder / "answers.json")
        server, self.upstream = start_server("upstream", str(written), log, core=CORES[-1])
        self._processes.append(server)
        url = f"http://{self.upstream.host}:{self.upstream.port}"
        relay, relay_address = start_server("relay", url, log, core=CORES[0])
        self._processes.append(relay)
        self.lasting: list[Side] = [Direct(server, self.upstream), Floor(relay, relay_address)]
        self.samples: dict[Point, list[Sample]] = defaultdict(list)
        self.turns_us: dict[int, list[float]] = defaultdict(list)

    def add_litellm(self, port: int) -> None:
        sides = start_litellm(self.upstream, self._folder, port)
        self.lasting += sides
        self._processes.append(sides[0].process)

    def _count(self, dialogues: int) -> int:
        return max(1, round(dialogues * self._share))

    def close(self) -> None:
        for process in reversed(self._processes):
            process.stop()

    async def round(self, number: int, *, counts: bool) -> None:
        """Measure every side at every point, then the long conversation."""
        folder = self._folder / f"round{number}"
        folder.mkdir()
        ours = start_ours(self.upstream, self.model_dir, folder)
        try:
            sides = [*self.lasting, ours] if number % 2 else [ours, *self.lasting]
            for size in SIZES:
                for concurrency in DIALOGUES:
                    for side in sides:
                        sample = await self._measure(side, size, concurrency)
                        if counts:
                            self.samples[side.name, size, concurrency].append(sample)
            if counts:
                await self._long_conversation(ours)
        finally:
            ours.process.stop()

    async def _measure(self, side: Side, size: str, concurrency: int) -> Sample:
        counts = LITELLM_DIALOGUES if isinstance(side, LiteLLM) else DIALOGUES
        dialogues = self._dialogues[size][: self._count(counts[concurrency])]
        conversations = await side.conversations(dialogues, TURNS, self.reply)
        loop = asyncio.get_running_loop()
        before, began = cpu_s(side.process.pid), loop.time()
        result = await load(side.address, conversations, concurrency)
        after, ended = cpu_s(side.process.pid), loop.time()
        latencies_ms = sorted(1e3 * latency_s for latency_s in result.latencies_s)
        count = len(latencies_ms)
        return Sample(
            1e6 * (after - before) / count,
            statistics.median(latencies_ms),
            latencies_ms[min(count - 1, int(0.99 * count))],
            count / (ended - began),
        )

    async def _long_conversation(self, ours: Ours) -> None:
        """Turn by turn, so that each has its own figure."""
        conversations = await ours.conversations(self.long, LONG_TURNS, self.reply)
        for turn in range(LONG_TURNS):
            before = cpu_s(ours.process.pid)
            await load(ours.address, [[requests[turn]] for requests in conversations], 1)
            used_us = 1e6 * (cpu_s(ours.process.pid) - before)
            # The opening was turn 1.
            self.turns_us[turn + 2].append(used_us / len(conversations))

    def median(self, side: type[Side], size: str, concurrency: int, what: str = "cpu_us") -> float:
        samples = self.samples[side.name, size, concurrency]
        return float(statistics.median(getattr(sample, what) for sample in samples))

    def added_ms(self, size: str, concurrency: int, what: str) -> float:
        """Compute the median over rounds of our proxy's latency beyond the upstream's own."""
        pairs = zip(
            self.samples[Ours.name, size, concurrency],
            self.samples[Direct.name, size, concurrency],
            strict=True,
        )
        return float(statistics.median(getattr(a, what) - getattr(b, what) for a, b in pairs))

    def litellm_ratio(self, side: type[Side], size: str) -> float:
        pairs = zip(
            self.samples[side.name, size, 32], self.samples[Ours.name, size, 32], strict=True
        )
        return statistics.median(a.cpu_us / b.cpu_us for a, b in pairs)


def _reply(texts: Texts) -> tuple[Message, Answers]:
    """Build the upstream's reply: so many tokens, the end of the turn included."""
    encode = texts.tokenizer.encode
    text = texts.text(REPLY_TOKENS + 50)
    ids = encode(text, add_special_tokens=False).ids[: REPLY_TOKENS - 1]
    text = texts.tokenizer.decode(ids)
    tokens = [texts.tokenizer.decode([token]) for token in ids]
    answers = Answers(text, [*ids, texts.eos], [*tokens, ""])
    return {"role": "assistant", "content": text}, answers


def print_table(bench: Bench) -> None:
    for size in SIZES:
        for concurrency in DIALOGUES:
            print(f"\n{size} prompt tokens, {concurrency} at once".ljust(41), end="")
            print(f"{'CPU us':>9}{'req/s/core':>12}{'p50 ms':>9}{'p99 ms':>9}{'x ours':>8}")
            ours_us = bench.median(Ours, size, concurrency)
            for side in (type(bench.lasting[0]), Floor, Ours, LiteLLM, LiteLLMLogprobs):
                if not bench.samples.get((side.name, size, concurrency)):
                    continue
                cpu_us = bench.median(side, size, concurrency)
                p50_ms, p99_ms = (
                    bench.median(side, size, concurrency, what) for what in ("p50_ms", "p99_ms")
                )
                print(
                    f"  {side.name:<38}{cpu_us:>9.0f}{1e6 / cpu_us:>12.0f}"
                    f"{p50_ms:>9.2f}{p99_ms:>9.2f}{cpu_us / ours_us:>8.2f}"
                )
    shown = [turn for turn in (2, 4, 8, 16, 32, 48, 64, 65) if turn in bench.turns_us]
    print("\none conversation, CPU us by turn: ", end="")
    print(", ".join(f"{turn}: {statistics.median(bench.turns_us[turn]):.0f}" for turn in shown))


def figures_of(bench: Bench) -> dict[str, float]:
    cpu_us = {size: bench.median(Ours, size, 32) for size in SIZES}
    figures = {
        "cpu_us_1k": cpu_us["1k"],
        "cpu_us_8k": cpu_us["8k"],
        "floor_cpu_us_1k": bench.median(Floor, "1k", 32),
        "added_p50_ms_c1": bench.added_ms("1k", 1, "p50_ms"),
        "added_p99_ms_c1": bench.added_ms("1k", 1, "p99_ms"),
        "turn64_over_turn2": statistics.median(
            late / early for late, early in zip(bench.turns_us[64], bench.turns_us[2], strict=True)
        ),
        "requests_per_s_core_1k": 1e6 / cpu_us["1k"],
    }
    for size in SIZES:
        for concurrency in (1, 256):
            figures[f"cpu_us_{size}_c{concurrency}"] = bench.median(Ours, size, concurrency)
        if bench.samples.get((LiteLLM.name, size, 32)):
            figures[f"litellm_over_ours_{size}"] = bench.litellm_ratio(LiteLLMLogprobs, size)
            figures[f"litellm_plain_over_ours_{size}"] = bench.litellm_ratio(LiteLLM, size)
    return figures


async def measure(bench: Bench, rounds: int) -> None:
    await bench.round(-1, counts=False)
    for number in range(rounds):
        await bench.round(number, counts=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench proxy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of calls")
    parser.add_argument("--litellm-port", type=int, default=4123, help="where LiteLLM may listen")
    parser.add_argument("--no-litellm", action="store_true", help="leave it and its figures out")
    add_out(parser, "proxy")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        port = None if arguments.no_litellm else arguments.litellm_port
        bench = Bench(Path(folder), arguments.share)
        try:
            if port is not None:
                bench.add_litellm(port)
            uvloop.run(measure(bench, arguments.rounds))
        finally:
            bench.close()
    print_table(bench)
    settings = {
        "rounds": arguments.rounds,
        "calls_per_point": {str(key): TURNS * count for key, count in DIALOGUES.items()},
        "reply_tokens": REPLY_TOKENS,
        "litellm": None if port is None else LITELLM,
    }
    report(figures_of(bench), settings, arguments.out)


if __name__ == "__main__":
    main()
