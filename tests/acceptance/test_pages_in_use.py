"""Pages of `areal-hpc view` in Chromium: their loading times, and their use by keyboard alone.

At both widths, in light and dark. Writes `benchmarks/results/pages.json`. Each limit of a page of a
run of 100,000 rows holds for seconds of the wall, or for those of processors where other work keeps
them busy.
"""

import asyncio
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.answers.step_change import explain_step_difference
from tests.support.browser import Page, open_page, serving_pages
from tests.support.commands import areal_hpc, said_by
from tests.support.dashboard_run import INJECTIONS, append_step, make_run
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.process_commands import find_processes
from tests.support.results import add_results
from tests.support.run_files import unpack_archive, unpack_kept_run
from tests.support.sample_trajectories import seal_in, trajectory
from tests.support.small_run import LIGHT, SmallRun

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio]

RUN = "run=made/run"
ROWS, EPISODES_PER_STEP = 100_000, 500
TRIES = 5
LONG_TOKENS, LONG_TURNS = 60_000, 60
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
MAX_FIRST_PAGE_S, MAX_FILTER_S = 2.0, 0.3
MAX_LONG_EPISODE_S = 1.0
MAX_LATE_S = 2.0
MAX_SERVER_BYTES = 300e6


def play(rng: random.Random, task: int) -> MadeEpisode:
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


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "runs")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


class Watch:
    """Meter of the processor time of a server, and of the browser with a folder."""

    def __init__(self, server: psutil.Process, folder: Path | None = None) -> None:
        self._processes = [server, *(find_browser(folder) if folder else ())]
        self._used_s = self._measure_processors()
        self._began = time.monotonic()

    def stop(self) -> float:
        wall_s = time.monotonic() - self._began
        return min(wall_s, self._measure_processors() - self._used_s)

    def _measure_processors(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self._processes if p.is_running())


def find_browser(folder: Path) -> list[psutil.Process]:
    first = find_processes(f"={folder}/")[0]
    return [first, *first.children(recursive=True)]


async def open_often(page: Page, url: str, folder: Path, name: str, shown: str) -> float:
    """The median time from an empty tab to a page on which an expression is true."""
    took_s = []
    for _ in range(TRIES):
        await page.open("about:blank")
        watch = Watch(get_server(url), folder)
        await page.open(f"{url}#/{name}")
        await page.await_true(f"document.readyState === 'complete' && ({shown})", poll_s=0.01)
        await page.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        took_s.append(watch.stop())
    return statistics.median(took_s)


def get_server(url: str) -> psutil.Process:
    port = int(url.split(":")[2].split("/")[0])
    (pid,) = (
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1] == port
    )
    return psutil.Process(pid)


def measure_filters(url: str, patterns: tuple[str, ...], last_step: int) -> float:
    """The 95th percentile of a page of rows, over filters none of which is twice."""
    took_s, server = [], get_server(url)
    with httpx.Client(timeout=60) as client:
        for number in range(20):
            for pattern in patterns:
                where = pattern.format(step=1 + number % last_step)
                query = {"run": "made/run", "where": where, "sort": "reward", "count": "100"}
                watch = Watch(server)
                answer = client.get(f"{url}data/rows", params=query)
                took_s.append(watch.stop())
                assert answer.status_code == 200, answer.text
    return float(np.percentile(took_s, 95))


def note(**seconds: float) -> None:
    add_results("pages", **{f"{name}_s": round(time_s, 3) for name, time_s in seconds.items()})


async def test_pages_of_a_large_run_are_there_soon(
    made: MadeRun, environ: dict[str, str], tmp_path: Path
) -> None:
    rng = random.Random(1)
    for first in range(0, ROWS, EPISODES_PER_STEP):
        made.add_step([play(rng, first + index) for index in range(EPISODES_PER_STEP)])
    with serving_pages(made.paths.root, environ) as address:
        for _ in range(2):  # the first one waits for the index
            httpx.get(f"{address}data/rows?{RUN}", timeout=120).raise_for_status()
        async with open_page(tmp_path) as page:
            shown_by_page = {
                "overview": "document.querySelectorAll('.chart path').length >= 2",
                "trajectories": "document.querySelectorAll('tr[data-link]').length === 100",
            }
            pages = {
                name: await open_often(page, address, tmp_path, f"{name}?{RUN}", shown)
                for name, shown in shown_by_page.items()
            }
        by_filter = measure_filters(address, FILTERS, made.step)
        by_text = measure_filters(address, TEXTS, made.step)
        memory = get_server(address).memory_info().rss
    note(**pages, filter_p95=by_filter, text_p95=by_text)
    add_results("pages", server_bytes=memory)
    assert max(pages.values()) <= MAX_FIRST_PAGE_S, pages
    assert max(by_filter, by_text) <= MAX_FILTER_S, (by_filter, by_text)
    assert memory <= MAX_SERVER_BYTES


async def test_a_long_episode_is_shown_soon_with_every_token(
    made: MadeRun, environ: dict[str, str], tmp_path: Path
) -> None:
    rng = random.Random(1)
    make_tiny_model(made.paths.starting_model_dir, [" ".join(WORDS)], vocab=384)
    episode = MadeEpisode(
        calls=LONG_TURNS,
        call_tokens=LONG_TOKENS // LONG_TURNS,
        reply=[rng.randrange(10, 250) for _ in range(LONG_TOKENS)],
        text=" ".join(rng.choices(WORDS, k=LONG_TOKENS // 4)),
    )
    made.add_step([episode])
    (shard,) = made.paths.shards_dir.glob("*.h5")
    with serving_pages(made.paths.root, environ) as address:
        async with open_page(tmp_path) as page:
            name = f"trajectory?{RUN}&row={shard.name}/0"
            shown = "document.querySelectorAll('.tokens span').length > 1000"
            took_s = await open_often(page, address, tmp_path, name, shown)
    note(episode_of_60000_tokens=took_s)
    assert took_s <= MAX_LONG_EPISODE_S


async def test_an_open_page_follows_a_step(
    made: MadeRun, environ: dict[str, str], tmp_path: Path
) -> None:
    rng = random.Random(1)
    made.add_step([play(rng, 0)])
    with serving_pages(made.paths.root, environ) as address:
        async with open_page(tmp_path) as page:
            late = []
            await page.open(f"{address}#/overview?{RUN}")
            await page.await_true("document.getElementById('live')?.textContent === 'live'")
            for _ in range(TRIES):
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                made.add_step([play(rng, made.step)])
                began = time.monotonic()
                facts = "[...document.querySelectorAll('.facts dd')].map((one) => one.textContent)"
                await page.await_true(f"{facts}[0]?.startsWith('{made.step} of 100')", poll_s=0.01)
                late.append(time.monotonic() - began)
    note(live_median=statistics.median(late), live_max=max(late))
    assert statistics.median(late) <= MAX_LATE_S, late


IMAGES = CHECKOUT / "docs" / "images"
SAMPLES, SWITCH_STEP = CHECKOUT / "examples" / "sample_runs.tar.xz", 30
"""Runs, and the step from which on the tasks of one of them are harder."""
WIDE, NARROW = (1340, 950), (390, 844)
PAGES = ("", "overview", "metrics", "timeline", "evaluations", "trajectories")
MAX_TABS = 120
IS_NEW = "document.querySelector('main h1')?.dataset.old === undefined"
"""Expression that is true after the page was made anew."""
PRESSED = "document.querySelector('button[aria-pressed=\"true\"]')?.innerText"
CAPTION = "document.querySelector('.status-line').textContent"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    small = SmallRun(tmp_path_factory.mktemp("shown"), *LIGHT)
    small.finish()
    return small.paths


@pytest.fixture
def url(run: RunPaths, environ: dict[str, str]) -> Iterator[str]:
    with serving_pages(run.root, environ) as address:
        yield address


async def show(page: Page, url: str, name: str, query: str) -> None:
    await page.open(f"{url}#/{name}?{query}")
    await page.await_true("document.querySelector('main h1, main .problem') !== null")
    await asyncio.sleep(0.3)  # charts are drawn when their size is known


async def tab_to(page: Page, text: str) -> None:
    name = "(document.activeElement.getAttribute('aria-label') || document.activeElement.innerText)"
    for _ in range(MAX_TABS):
        await page.press("Tab")
        if str(await page.ask(name)).startswith(text):
            return
    content = await page.ask("location.hash + document.querySelector('main').innerText")
    raise AssertionError(f"{text!r} cannot be reached by {MAX_TABS} tabs: {content[:2000]}")


async def test_every_page_at_both_widths_in_light_and_dark(url: str, tmp_path: Path) -> None:
    async with open_page(tmp_path) as page:
        for size in (WIDE, NARROW):
            await page.resize(*size)
            for scheme in ("light", "dark"):
                await page.prefer_colors(scheme)
                for name in PAGES:
                    await show(page, url, name, "run=quickstart/demo" if name else "")
                    assert not await page.ask("document.querySelector('main > .problem') !== null")
                    wide = await page.ask("document.documentElement.scrollWidth")
                    assert wide <= size[0], f"{name} is {wide} px wide, the window {size[0]}"
        hosts = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
        assert hosts == {urlsplit(url).netloc}, "nothing is asked for elsewhere"


async def test_the_timeline_by_keyboard_alone(url: str, tmp_path: Path) -> None:
    async with open_page(tmp_path) as page:
        await page.resize(*WIDE)
        await show(page, url, "overview", "run=quickstart/demo")
        await tab_to(page, "Timeline")
        await page.press("Enter")
        await page.await_true("document.querySelector('.timeline canvas') !== null")
        await asyncio.sleep(0.5)
        await page.photograph(IMAGES / "view_timeline.png")
        await tab_to(page, "episodes")
        await page.press("ArrowRight")
        await page.press("ArrowRight")
        assert "ticket_id=" in await page.ask(CAPTION)
        await page.press("Enter")
        await page.await_true("/trajector/.test(location.hash)")
        await page.ask("history.back()")
        await page.await_true("document.querySelector('.timeline canvas') !== null")
        for key in ("+", "]", "-"):
            before = await page.ask("location.hash")
            await page.press(key)
            await page.await_true(f"location.hash !== {before!r}")
            await page.await_true("document.querySelector('.timeline canvas') !== null")
        assert "from=" in await page.ask("location.hash")


async def test_tokens_are_found_and_colored_by_keyboard_alone(url: str, tmp_path: Path) -> None:
    async with open_page(tmp_path) as page:
        await page.resize(*WIDE)
        await show(page, url, "trajectories", "run=quickstart/demo")
        await page.press("/")
        for letter in "kind=train and step=2":
            await page.press(letter)
        await page.press("Enter")
        await page.await_true("location.hash.includes('where=')")
        first = "document.querySelector('tr[data-link]')?.cells"
        await page.await_true(
            f"{first}?.[4].innerText === 'train' && {first}?.[5].innerText === '2'"
        )
        await page.press("Escape")
        await page.press("j")
        await page.ask("document.activeElement.blur()")
        await page.press("Enter")
        await page.await_true("document.querySelector('.tokens') !== null")
        for color in ("entropy", "advantage", "ratio", "mismatch", "mask"):
            await tab_to(page, color)
            await page.press("Enter")
            await page.await_true(f"location.hash.includes('color={color}')")
            await page.await_true(f"{PRESSED} === {color!r}")
        await tab_to(page, "entropy")
        await page.press("Enter")
        await page.await_true(f"{PRESSED} === 'entropy'")
        pieces = "[...document.querySelectorAll('.tokens span')]"
        assert await page.ask(f"{pieces}.filter((one) => one.style.background).length") > 0
        await tab_to(page, "tokens")
        await page.press("ArrowRight")
        assert re.fullmatch(r"0: id \d+, prompt", await page.ask(CAPTION))
        await page.press("End")
        assert re.search(r"trainer -?\d.*entropy \d", await page.ask(CAPTION))
        await page.ask("document.querySelector('.tokens').scrollIntoView({block: 'center'})")
        await page.photograph(IMAGES / "view_tokens.png")


async def test_what_the_reader_is_at_outlasts_news(environ: dict[str, str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    names = {f"made/{number}": 0.5 for number in range(40)}
    for step in (2, 3, 4):
        append_step(run, step, 0.5, **names)
    with serving_pages(run.root.parent.parent, environ) as address:
        async with open_page(tmp_path) as page:
            await page.resize(*WIDE)
            tickets = iter(range(30, 99))

            async def hear_news(*, shown: bool = True) -> None:
                await page.await_true("document.getElementById('live')?.textContent === 'live'")
                await page.ask("document.querySelector('main h1').dataset.old = 'yes'")
                ticket = next(tickets)
                append_step(run, ticket, 0.5, **names)
                seal_in(run, [trajectory(ticket)], writer=f"cell-{ticket}")
                if shown:
                    await page.await_true(IS_NEW)
                else:
                    await page.await_true("isHeldBack")
                    assert not await page.ask(IS_NEW)

            query = "run=shown/run"
            await show(page, address, "trajectories", query)
            third = "document.querySelectorAll('td a')[2]"
            link = await page.ask(f"{third}.getAttribute('href')")
            await page.ask(f"{third}.focus()")
            await hear_news()
            assert await page.ask("document.activeElement.getAttribute('href')") == link
            await page.press("/")
            await page.press("x")
            await hear_news(shown=False)
            assert await page.ask("document.activeElement.value") == "x"
            await page.press("Tab")
            await page.await_true(IS_NEW)
            assert await page.ask("document.querySelector('input').value") == "x", "not lost"
            await page.ask("getSelection().selectAllChildren(document.querySelector('main h1'))")
            await hear_news(shown=False)
            assert await page.ask("getSelection().toString()") == "Trajectories"
            await page.ask("getSelection().empty()")
            await page.await_true(IS_NEW)
            point = (
                "document.dispatchEvent(new PointerEvent('pointer{}', {{button: 0, buttons: {}}}))"
            )
            await page.ask(point.format("down", 1))
            await page.ask(point.format("move", 1))
            await hear_news(shown=False)
            await page.ask(point.format("move", 0))
            await page.await_true(IS_NEW)  # no event reports the release

            await show(page, address, "metrics", query)
            await page.await_true("document.querySelector('select') !== null")
            await page.ask("scrollTo(0, document.documentElement.scrollHeight)")
            offset = await page.ask("scrollY")
            await page.ask("document.querySelector('select').focus({preventScroll: true})")
            await hear_news()
            assert await page.ask("document.activeElement.tagName") == "SELECT"
            await asyncio.sleep(0.5)
            assert await page.ask("scrollY") == offset > 1000

            await show(page, address, "timeline", f"{query}&from=1000&to=1010")
            await tab_to(page, "steps")
            await page.press("ArrowRight")
            await page.press("ArrowRight")
            text = await page.ask(CAPTION)
            assert text.startswith("step 2:")
            await hear_news()
            assert await page.ask(CAPTION) == text
            await page.press("ArrowRight")
            assert str(await page.ask(CAPTION)).startswith("step 3:")


async def test_pages_that_answers_name_show_something(
    environ: dict[str, str], tmp_path: Path
) -> None:
    unpack_archive(SAMPLES, tmp_path)
    samples = tmp_path / "sample_runs"
    answers = (
        explain_slow_run(RunPaths(samples / "slow")),
        explain_step_difference(RunPaths(samples / "drop"), SWITCH_STEP),
        diagnose_collapse(RunPaths(samples / "collapse")),
    )
    pages = sorted(
        {finding.page for answer in answers for finding in answer.findings if finding.page}
    )
    assert len(pages) >= 8
    with serving_pages(samples, environ) as address:
        async with open_page(tmp_path) as page:
            for path in pages:
                await page.open("about:blank")
                await page.open(f"{address}{path}")
                await page.await_true("document.querySelector('main h1, main .problem') !== null")
                assert not await page.ask("document.querySelector('main .problem') !== null"), path
                shown = "document.querySelectorAll('tr[data-link], .chart path, .message').length"
                await page.await_true(f"{shown} > 0")


def report_on(run: RunPaths, out: Path, environ: dict[str, str]) -> str:
    said_by(areal_hpc("report", run.root, "--out", out, environ=environ))
    return out.as_uri()


async def test_nothing_that_an_agent_wrote_runs_or_becomes_an_element(
    environ: dict[str, str], tmp_path: Path
) -> None:
    report = report_on(make_run(tmp_path / "runs"), tmp_path / "report.html", environ)
    alive = "main :is(script, img, iframe, object, embed, style, base)"
    attributes = "[...document.querySelectorAll('main *')].flatMap(one => one.getAttributeNames())"
    async with open_page(tmp_path) as page:
        for name, query in (("trajectory", "&row=cell-0-000001.h5%2F0"), ("trajectories", "")):
            await show(page, report, name, f"run=shown/run{query}")
            assert "pwned" not in await page.ask("document.title")
            shown = await page.ask("document.querySelector('main').innerHTML")
            assert "onerror" in shown, "as text"
            assert await page.ask(f"document.querySelectorAll('{alive}').length") == 0
            handlers = f"{attributes}.filter(one => one.startsWith('on') || one === 'src')"
            assert await page.ask(handlers) == []
            if query:
                injected = sum("pwned" in text for text in INJECTIONS)
                assert shown.count("pwned") >= 2 * injected


async def test_a_report_on_a_whole_run_shows_it(environ: dict[str, str], tmp_path: Path) -> None:
    run = RunPaths(unpack_kept_run(tmp_path))
    report = report_on(run, tmp_path / "report.html", environ)
    name = f"{run.root.parent.name}/{run.root.name}"
    least = {"overview": ("path", 8), "metrics": ("figure", 40), "evaluations": ("tr", 5)}
    async with open_page(tmp_path) as page:
        await page.resize(1340, 1400)
        for where, (element, count) in least.items():
            await show(page, report, where, f"run={name}")
            shown = f"document.querySelectorAll('main {element}').length"
            await page.await_true(f"{shown} >= {count}")
            if where == "overview":
                await page.photograph(IMAGES / "view_overview.png")
        lines = "document.querySelectorAll('main {}').length"
        counts = [await page.ask(lines.format(shape)) for shape in ("path", "polygon")]
        assert counts == [1, 1], "mean and interval"
        await show(page, report, "summary", f"run={name}")
        assert "trained_once=" in await page.ask("document.querySelector('main').innerText")
