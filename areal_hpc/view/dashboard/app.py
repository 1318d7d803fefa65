"""ASGI application of the dashboard and its server: the page, its data as JSON, change events.

Every path begins with a secret. A request names a run among those in the folder, and never a file.
Text that agents wrote is sent as JSON only, and the page inserts it as text.
"""

import asyncio
import getpass
import hmac
import json
import math
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from areal_hpc.errors import ArealError, ClusterError, RecipeError
from areal_hpc.jobs.node import LOOPBACK_ADDRESS
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.paths import RunPaths, list_runs
from areal_hpc.view.dashboard import run_pages
from areal_hpc.view.dashboard.evaluation_page import (
    build_evaluation_sets_page,
    build_set_filters,
    label_evaluation_rows,
    list_set_names,
)
from areal_hpc.view.dashboard.timeline_page import describe_timeline
from areal_hpc.view.state.run_view import RunView, RunViewer
from areal_hpc.view.transcripts.row_index import RowIndex, get_cache_dir, make_private_folder
from areal_hpc.wire.http_server import GuardedServer

STATIC_FILES = resources.files("areal_hpc.view.dashboard") / "static"
MEDIA_TYPE_BY_SUFFIX = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MEDIA_TYPE_BY_STATIC_FILE = {
    file.name: f"{MEDIA_TYPE_BY_SUFFIX[suffix]}; charset=utf-8"
    for file in STATIC_FILES.iterdir()
    if (suffix := Path(file.name).suffix) in MEDIA_TYPE_BY_SUFFIX
}
RESPONSE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MAX_ROWS_PER_PAGE = 500
POLL_S = 1.0
"""Seconds between two polls of the files of a run whose page is open."""
RUNS_POLL_S = 10.0
"""Seconds between two polls for the page of all runs, of which there may be hundreds."""
PING_INTERVAL_S = 15.0
END_CHECK_INTERVAL_S = 0.25
"""Seconds between two checks for the end of the server."""

JsonObject = dict[str, Any]
Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PageRequest:
    view: RunView
    query: Query
    open_rows: Callable[[], RowIndex]
    """Function that returns the index of the rows recorded by now."""


def _find_row_page(request: PageRequest) -> JsonObject:
    query, problems = request.query, list[str]()
    index, sets = request.open_rows(), list_set_names(request.view.paths, problems)
    page = index.find_page(
        query.get("where", ""),
        query.get("sort", ""),
        descending=query.get("order") != "up",
        offset=_parse_count(query, "offset", 0, 10**9),
        count=_parse_count(query, "count", 100, MAX_ROWS_PER_PAGE),
    )
    label_evaluation_rows(page.rows, sets)
    return {
        "rows": page.rows,
        "sets": build_set_filters(sets),
        "matching": page.matching,
        "total": page.total,
        "problems": [*problems, *index.list_read_problems()],
    }


def _describe_trajectory(request: PageRequest) -> JsonObject:
    run = request.view.paths
    shard, row = run_pages.parse_row_name(request.query.get("row", ""))
    return run_pages.describe_trajectory(
        run, request.open_rows(), shard, row, list_set_names(run, [])
    )


def _find_profile(request: PageRequest) -> Path:
    """Find a trace among those that exist, so that a request names no other file."""
    paths, named = request.view.paths, request.query.get("file", "")
    for path in paths.list_profiles():
        if str(path.relative_to(paths.profiles_dir)) == named:
            return path
    raise RecipeError(f"there is no trace {named[:100]!r}", key="file")


RUN_PAGES: dict[str, Callable[[PageRequest], Any]] = {
    "overview": lambda request: run_pages.describe_run_overview(request.view),
    "summary": lambda request: run_pages.describe_summary(request.view),
    "metrics": lambda request: run_pages.describe_metrics(request.view.paths),
    "evaluations": lambda request: build_evaluation_sets_page(request.view.paths),
    "timeline": lambda request: describe_timeline(request.view.paths, request.query),
    "failures": lambda request: request.open_rows().count_failure_causes(),
}
"""Pages of one run, which a report contains as well."""
CHOICE_PAGES: dict[str, Callable[[PageRequest], Any]] = {
    "rows": _find_row_page,
    "trajectory": _describe_trajectory,
    "profile": _find_profile,
}
"""Pages of what the reader chooses, which a report does not contain."""


def read_static_file(file_name: str) -> bytes:
    return (STATIC_FILES / file_name).read_bytes()


class DashboardApp:
    """Pages of the runs of a file root or an experiment's directory, or of one run."""

    def __init__(self, dir_with_runs: Path, secret: str, cache_dir: Path) -> None:
        self._dir_with_runs, self._secret, self._cache_dir = dir_with_runs, secret, cache_dir
        self._viewer = RunViewer()
        self.is_ending: Callable[[], bool] = lambda: False
        """Condition that ends the streams of change events."""
        self._indexes: dict[Path, RowIndex] = {}
        self._lock = threading.Lock()
        self._pages: dict[str, Callable[[Query], Any]] = {
            "data/runs": self._list_runs,
            **{
                f"data/{page}": partial(self._describe_run_page, page)
                for page in (*RUN_PAGES, *CHOICE_PAGES)
            },
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response = await self._answer_request(request)
        response.headers.update(RESPONSE_HEADERS)
        await response(scope, receive, send)

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()

    async def _answer_request(self, request: Request) -> Response:
        secret, _, name = request.url.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return Response("open the address that areal-hpc view printed", 401)
        if request.method not in ("GET", "HEAD"):
            return Response("this server is read-only: use GET", 405)
        name = name or "index.html"
        if name in MEDIA_TYPE_BY_STATIC_FILE:
            content = await run_in_threadpool(read_static_file, name)
            return Response(content, media_type=MEDIA_TYPE_BY_STATIC_FILE[name])
        if name == "live":
            return await self._stream_change_events(request)
        page = self._pages.get(name)
        if page is None:
            return Response("there is no such page", 404)
        try:
            data = await run_in_threadpool(page, request.query_params)
        except Exception as error:  # boundary: the page shows it; files may hold anything
            run_name = request.query_params.get("run", "all runs")
            title = f"{name} of {run_name} in {self._dir_with_runs}"
            status_code = 400 if isinstance(error, ArealError) else 500
            return _build_json_response(
                {"error": run_pages.explain_page_error(title, error)}, status_code
            )
        if isinstance(data, Path):
            return FileResponse(data, filename=f"{data.parent.name}.{data.name}")
        return _build_json_response(data)

    def _find_run(self, query: Query) -> RunPaths:
        name = query.get("run", "")
        for run in list_runs(self._dir_with_runs):
            if run.run_name == name:
                return run
        raise RecipeError(f"there is no run {name[:100]!r} in {self._dir_with_runs}", key="run")

    def _open_refreshed_index(self, run: RunPaths) -> RowIndex:
        with self._lock:
            if run.root not in self._indexes:
                self._indexes[run.root] = RowIndex(run, self._cache_dir)
            index = self._indexes[run.root]
        index.index_new_rows()
        return index

    def _list_runs(self, query: Query) -> JsonObject:
        runs = [run for run in list_runs(self._dir_with_runs) if run.root.is_dir()]
        return {
            "place": str(self._dir_with_runs),
            "runs": [run_pages.describe_run(view) for view in self._viewer.view(runs)],
        }

    def _describe_run_page(self, page: str, query: Query) -> Any:
        run = self._find_run(query)
        view = RunView(run)
        if page == "overview":  # the one that queries Slurm
            (view,) = self._viewer.view([run])
        describe = RUN_PAGES.get(page) or CHOICE_PAGES[page]
        return describe(PageRequest(view, query, lambda: self._open_refreshed_index(run)))

    async def _stream_change_events(self, request: Request) -> Response:
        if "run" not in request.query_params:
            fingerprint: Callable[[], Any] = partial(_fingerprint_runs, self._dir_with_runs)
            poll_s = RUNS_POLL_S
        else:
            try:
                run = await run_in_threadpool(self._find_run, request.query_params)
            except ArealError as error:
                return _build_json_response({"error": str(error)}, 400)
            fingerprint, poll_s = partial(_fingerprint_run_files, run), POLL_S
        return StreamingResponse(
            _stream_changes(fingerprint, poll_s, self.is_ending), media_type="text/event-stream"
        )


async def _stream_changes(
    read_fingerprint: Callable[[], Any], poll_s: float, is_ending: Callable[[], bool]
) -> AsyncIterator[str]:
    seen, silent_s = await run_in_threadpool(read_fingerprint), 0.0
    yield "event: open\ndata: {}\n\n"
    while True:
        for _ in range(round(poll_s / END_CHECK_INTERVAL_S)):
            await asyncio.sleep(END_CHECK_INTERVAL_S)
            if is_ending():
                return
        now = await run_in_threadpool(read_fingerprint)
        silent_s += poll_s
        if now != seen:
            seen, silent_s = now, 0.0
            yield "event: change\ndata: {}\n\n"
        elif silent_s >= PING_INTERVAL_S:
            silent_s = 0.0
            yield ": still here\n\n"


def _fingerprint_runs(dir_with_runs: Path) -> list[Any]:
    return [(run.root, _fingerprint_run_files(run)) for run in list_runs(dir_with_runs)]


def _fingerprint_run_files(run: RunPaths) -> list[Any]:
    followed = (
        *(run.metrics, run.sft_metrics, run.events, run.finished_marker),
        *(run.manifests_dir, run.evaluations_dir),
    )
    return [
        *map(_stat_file, followed),
        *map(_stat_file, sorted(run.shard_index_dir.glob("*"))),
    ]


def _stat_file(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _parse_count(query: Query, key: str, default: int, max_count: int) -> int:
    text = query.get(key, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise RecipeError(f"expected a number, got {text[:50]!r}", key=key)
    return min(int(text), max_count)


def _build_json_response(content: Any, status_code: int = 200) -> Response:
    return Response(encode_browser_json(content), status_code, media_type="application/json")


def encode_browser_json(content: Any) -> bytes:
    """Encode JSON that every browser reads: NaN and infinities become null."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"), default=str).encode()
    except ValueError:
        return json.dumps(
            _replace_nonfinite_by_null(content), separators=(",", ":"), default=str
        ).encode()


def _replace_nonfinite_by_null(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _replace_nonfinite_by_null(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_nonfinite_by_null(value) for value in content]
    return content


MAX_CONNECTIONS = 200
_PORT_FILE = "port"


def serve_dashboard(
    dir_with_runs: Path, port: int | None, print_line: Callable[[str], None]
) -> None:
    cache_dir = get_cache_dir()
    listener = _listen(cache_dir, port)
    # New at each start: another program on this port may have received the last one meanwhile.
    secret = secrets.token_urlsafe(24)
    host, own_port = socket.gethostname(), listener.getsockname()[1]
    app = DashboardApp(dir_with_runs, secret, cache_dir)
    print_line(f"{dir_with_runs}: open http://{LOOPBACK_ADDRESS}:{own_port}/{secret}/")
    print_line("from another machine, first:")
    user = "USER"
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    print_line(f"  ssh -L {own_port}:{LOOPBACK_ADDRESS}:{own_port} {user}@{host}")
    print_line("Ctrl-C stops this server, not the runs")
    with closing(listener), closing(app), suppress(KeyboardInterrupt):
        server = GuardedServer(app, MAX_CONNECTIONS, timeout_graceful_shutdown=2)
        app.is_ending = lambda: server.should_exit
        server.run(sockets=[listener])


def _listen(cache_dir: Path, port: int | None) -> socket.socket:
    make_private_folder(cache_dir)
    port_file, kept_port = cache_dir / _PORT_FILE, 0
    with suppress(OSError, ValueError):
        kept_port = int(port_file.read_bytes())
    problem: Exception | None = None
    for candidate in [port] if port is not None else [kept_port, 0]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK_ADDRESS, candidate))
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error
            continue
        listener.listen(128)
        write_atomic_private(port_file, str(listener.getsockname()[1]).encode())
        return listener
    raise ClusterError(
        f"port {port} cannot be used: {problem}",
        key="--port",
        hint="leave --port out to get one that is free",
    )
