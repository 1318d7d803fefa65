"""How soon pages of large runs are there, in Chromium and over HTTP: `results/pages.json`.

Each limit holds for seconds of the wall, or for those of processors where other work
keeps them busy.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.wire.row_record import CallRecord, RowRecord
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.browser import Page, in_browser
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.process_commands import command_of
from tests.support.results import add_results
from tests.support.sample_trajectories import seal_in
from tests.support.view_server import serving_pages

pytestmark = pytest.mark.timeout(1800)

RUN = "run=made/run"
EPISODES_PER_STEP = 500
TRIES = 5
LONG_TOKENS = 60_000
WORDS = [f"word{number}" for number in range(400)]
FILTERS = (
    "step={step}",
    "step>{step} and reward<0.5",
    "reward=0 and finish=length",
    "kind=train and length>200",
    "cell=cell-1 and seconds>1",
    "not (finish=stop) or task={step}",
)
TEXTS = ("text~'word{step} word'", "text~nowhere", "reward=0 and text~word{step}")


@dataclass(frozen=True)
class Limits:
    """What a run of so many rows may take."""

    rows: int
    first_page_s: float
    filter_s: float


SMALL, LARGE = Limits(10_000, 1.0, 0.1), Limits(100_000, 2.0, 0.3)
MIN_INDEXED_ROWS_PER_S = 15_000
MAX_LONG_EPISODE_S = 1.0
MAX_LATE_S = 2.0
MAX_SERVER_BYTES = 300e6


def play(rng: random.Random, task: int) -> MadeEpisode:
    """An episode of one call, whose reply has some 30 words."""
    reply = [rng.randrange(10, 150_000) for _ in range(rng.randrange(10, 300))]
    return MadeEpisode(
        cell=f"cell-{task % 2}",
        calls=1,
        call_s=rng.uniform(0.2, 2.0),
        call_tokens=len(reply),
        reward=float(rng.random() < 0.6),
        task=task,
        reply=reply,
        text=" ".join(rng.choices(WORDS, k=30)),
        finish=rng.choice(("stop", "stop", "length")),
    )


def make_run(folder: Path, rows: int) -> MadeRun:
    """A run of so many rows."""
    rng, run = random.Random(1), MadeRun(folder)
    while (done := run.step * EPISODES_PER_STEP) < rows:
        run.add_step([play(rng, done + place) for place in range(EPISODES_PER_STEP)])
    return run


@pytest.fixture(scope="module", params=[SMALL, LARGE], ids=lambda one: f"{one.rows} rows")
def limits(request: pytest.FixtureRequest) -> Limits:
    one: Limits = request.param
    return one


@pytest.fixture(scope="module")
def run(limits: Limits, tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("large"), limits.rows)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def url(run: MadeRun, environ: dict[str, str]) -> Iterator[str]:
    with serving_pages(run.paths.root, environ) as address:
        yield address


@dataclass(frozen=True)
class Effort:
    """What something took."""

    wall_s: float
    processor_s: float

    @property
    def least_s(self) -> float:
        """Of the wall; of processors where these were busy with other work."""
        return min(self.wall_s, self.processor_s)


class Watch:
    """Measures what a server, and the browser with a folder, take."""

    def __init__(self, server: psutil.Process, folder: Path | None = None) -> None:
        self._processes = [server, *(find_browser(folder) if folder else ())]
        self._used_s = self._measure_processors()
        self._began = time.monotonic()

    def stop(self) -> Effort:
        """What was taken since it was made."""
        wall_s = time.monotonic() - self._began
        return Effort(wall_s, self._measure_processors() - self._used_s)

    def _measure_processors(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._processes if one.is_running())


def find_browser(folder: Path) -> list[psutil.Process]:
    """The processes of the Chromium whose profile is in a folder."""
    first = next(one for one in psutil.process_iter() if f"={folder}/" in " ".join(command_of(one)))
    return [first, *first.children(recursive=True)]


async def open_anew(page: Page, url: str, folder: Path, name: str, shown: str) -> Effort:
    """From an empty tab to a page on which an expression is true."""
    await page.open("about:blank")
    watch = Watch(get_server(url), folder)
    await page.open(f"{url}#/{name}")
    await page.await_true(f"document.readyState === 'complete' && ({shown})", poll_s=0.01)
    await page.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return watch.stop()


def take_median(efforts: Sequence[Effort]) -> Effort:
    """The middle of each."""
    return Effort(
        statistics.median(one.wall_s for one in efforts),
        statistics.median(one.processor_s for one in efforts),
    )


def get_server(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.split(":")[2].split("/")[0])
    (found,) = (
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr[1] == port
    )
    return psutil.Process(found)


def measure_filters(url: str, patterns: tuple[str, ...], last_step: int) -> Effort:
    """The 95th percentile of a page of rows, over filters none of which is twice."""
    efforts, server = [], get_server(url)
    with httpx.Client(timeout=60) as client:
        for number in range(20):
            for pattern in patterns:
                where = pattern.format(step=1 + number % last_step)
                query = {"run": "made/run", "where": where, "sort": "reward", "count": "100"}
                watch = Watch(server)
                answer = client.get(f"{url}data/rows", params=query)
                efforts.append(watch.stop())
                assert answer.status_code == 200, answer.text
    return Effort(
        float(np.percentile([one.wall_s for one in efforts], 95)),
        float(np.percentile([one.processor_s for one in efforts], 95)),
    )


def test_rows_are_indexed_fast(run: MadeRun, limits: Limits, tmp_path: Path) -> None:
    with closing(RowIndex(run.paths, tmp_path / "cache")) as index:
        began = time.process_time()
        assert index.index_new_rows() == limits.rows
        rows_per_s = limits.rows / (time.process_time() - began)
    size = sum(one.stat().st_size for one in (tmp_path / "cache").iterdir())
    add_results(
        "pages",
        **{
            f"indexed_rows_per_s_{limits.rows}": round(rows_per_s),
            f"index_bytes_per_row_{limits.rows}": round(size / limits.rows),
        },
    )
    if limits is LARGE:  # with fewer rows the first shard, which loads libraries, weighs too much
        assert rows_per_s >= MIN_INDEXED_ROWS_PER_S


def test_pages_of_a_large_run_are_there_soon(
    run: MadeRun, limits: Limits, url: str, tmp_path: Path
) -> None:
    async def look(page: Page) -> dict[str, Effort]:
        pages = {
            "overview": "document.querySelectorAll('.chart path').length >= 2",
            "trajectories": "document.querySelectorAll('tr[data-link]').length === 100",
        }
        return {
            name: take_median(
                [await open_anew(page, url, tmp_path, f"{name}?{RUN}", shown) for _ in range(TRIES)]
            )
            for name, shown in pages.items()
        }

    for _ in range(2):  # the first one waits for the index
        httpx.get(f"{url}data/rows?{RUN}", timeout=120).raise_for_status()
    pages: dict[str, Effort] = in_browser(tmp_path, look)
    filters = {
        "filter_p95": measure_filters(url, FILTERS, run.step),
        "text_p95": measure_filters(url, TEXTS, run.step),
    }
    memory = get_server(url).memory_info().rss
    note(**{f"{name}_{limits.rows}": one for name, one in (pages | filters).items()})
    add_results("pages", **{f"server_bytes_{limits.rows}": memory})
    assert max(one.least_s for one in pages.values()) <= limits.first_page_s, pages
    assert filters["filter_p95"].least_s <= limits.filter_s, filters
    assert filters["text_p95"].least_s <= limits.filter_s
    assert memory <= MAX_SERVER_BYTES


def note(**efforts: Effort) -> None:
    """Keep figures."""
    for name, one in efforts.items():
        figures = {"wall_s": round(one.wall_s, 3), "processor_s": round(one.processor_s, 3)}
        add_results("pages", **{name: figures})


def make_long_episode(run: RunPaths) -> str:
    """A row of many turns and 60,000 tokens, of a model whose tokenizer is there; its name."""
    turns, half = 60, LONG_TOKENS // 120
    rng = np.random.default_rng(1)
    text = " ".join(rng.choice(WORDS, half).tolist())
    make_tiny_model(run.starting_model_dir, [text], hidden=32, heads=2, kv_heads=2, head_dim=16)
    mask = np.tile(np.repeat(np.array([0, 1], np.uint8), half), turns)
    calls = [
        CallRecord(
            id=f"c{turn}", parent_id=f"c{turn - 1}" if turn else None, trained=True,
            asked_at=1e9 + turn, answered_at=1e9 + turn + 0.5, replica=0,
            prompt_tokens=half, reply_tokens=half, finish_reason="stop", new_messages=1,
        )
        for turn in range(turns)
    ]  # fmt: skip
    said: list[dict[str, Any]] = [{"role": role, "content": text} for role in ("user", "assistant")]
    row = TrajectoryRow(
        ticket_id=10**6, attempt=1, episode=0, row=0,
        input_ids_T=rng.integers(10, 250, LONG_TOKENS).astype(np.int32),
        loss_mask_T=mask,
        logprobs_T=(-rng.exponential(0.5, LONG_TOKENS) * mask).astype(np.float32),
        versions_T=np.where(mask, WeightVersion(1, 1).packed, -1).astype(np.int64),
        reward=1.0,
        record=RowRecord(
            session_id="long", cell="cell-0", started_at=1e9, ended_at=1e9 + turns, calls=calls
        ),
        meta={"messages": said * turns},
    )  # fmt: skip
    return f"{seal_in(run, [row]).file}/0"


def test_a_long_episode_is_shown_soon_with_every_token(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    run = MadeRun(tmp_path / "runs")
    run.add_step([play(random.Random(1), 0)])
    row = make_long_episode(run.paths)

    async def look(page: Page) -> list[Effort]:
        name = f"trajectory?{RUN}&row={row}"
        told = "document.querySelector('main').textContent.includes('60,000 tokens, ')"
        shown = f"{told} && document.querySelector('.tokens .prompt') !== null"
        return [await open_anew(page, address, tmp_path, name, shown) for _ in range(TRIES)]

    with serving_pages(run.paths.root, environ) as address:
        effort = take_median(in_browser(tmp_path, look))
    note(episode_of_60000_tokens=effort)
    assert effort.least_s <= MAX_LONG_EPISODE_S


def test_an_open_page_follows_a_step(tmp_path: Path, environ: dict[str, str]) -> None:
    run = MadeRun(tmp_path / "runs")
    rng = random.Random(1)
    run.add_step([play(rng, 0)])

    async def look(page: Page) -> list[float]:
        late = []
        await page.open(f"{address}#/overview?{RUN}")
        await page.await_true("document.getElementById('live')?.textContent === 'live'")
        for _ in range(TRIES):
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            run.add_step([play(rng, run.step)])
            began = time.monotonic()
            facts = "[...document.querySelectorAll('.facts dd')].map((one) => one.textContent)"
            await page.await_true(f"{facts}[0]?.startsWith('{run.step} of 100')", poll_s=0.01)
            late.append(time.monotonic() - began)
        return late

    with serving_pages(run.paths.root, environ) as address:
        late = in_browser(tmp_path, look)
    median_s = statistics.median(late)
    add_results("pages", live_median_s=round(median_s, 3), live_max_s=round(max(late), 3))
    assert median_s <= MAX_LATE_S, late
