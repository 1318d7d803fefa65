"""Pages of runs as one HTML file, to attach to a paper or a ticket: `areal-hpc report`."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.dashboard import run_pages
from areal_hpc.view.dashboard.app import (
    RUN_PAGES,
    PageRequest,
    encode_browser_json,
    read_static_file,
)
from areal_hpc.view.dashboard.evaluation_page import (
    label_evaluation_rows,
    list_set_names,
)
from areal_hpc.view.state.run_view import RunView, view_runs
from areal_hpc.view.transcripts.row_index import RowIndex

MAX_ROWS = 500
"""Number of conversations of all runs together."""
MAX_CONVERSATION_BYTES = 24 << 20
"""Size of the conversations of all runs together: a browser reads the whole file at once."""

JsonObject = dict[str, Any]


def write_report(runs: Sequence[RunPaths], out: Path, cache_dir: Path) -> int:
    """Write the pages of runs into a new private file, and return its number of conversations.

    A page that cannot be made shows the reason.
    """
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    names = [run.run_name for run in runs]
    pages: dict[str, JsonObject] = {}
    listed = []
    limits = MAX_ROWS // len(runs), MAX_CONVERSATION_BYTES // len(runs)
    for view in view_runs(runs, QueuePoller()):
        run = view.paths
        # Several runs may have one name.
        name = run.run_name if names.count(run.run_name) == 1 else str(run.root)
        listed.append(run_pages.describe_run(view) | {"name": name})
        with closing(RowIndex(run, cache_dir)) as index:
            index.index_new_rows()
            pages[name] = _describe_pages(view, index) | _describe_rows(run, index, *limits)
    content = {"list": {"place": "", "runs": listed}, "runs": pages}
    write_atomic_private(out, _render_html(encode_browser_json(content).decode()).encode())
    return sum(len(page["trajectories"]) for page in pages.values())


def _describe_pages(view: RunView, index: RowIndex) -> JsonObject:
    request = PageRequest(view, {}, lambda: index)
    return {
        name: _describe_page(f"{name} of {view.paths.root}", "error", partial(describe, request))
        for name, describe in RUN_PAGES.items()
    }


def _describe_rows(run: RunPaths, index: RowIndex, max_rows: int, max_bytes: int) -> JsonObject:
    """Describe failed and held-out rows, and groups of steps over the run, up to the limits."""
    sets, trajectories, rows = list_set_names(run, []), dict[str, JsonObject](), []
    for row in index.select_sample_rows(max_rows):
        name = f"{row['shard']}/{row['row']}"
        describe = partial(
            run_pages.describe_trajectory, run, index, row["shard"], row["row"], sets
        )
        # The key `error` is that of the episode.
        content = _describe_page(f"{name} of {run.root}", "problem", describe)
        max_bytes -= len(encode_browser_json(content))
        if max_bytes < 0:
            break
        trajectories[name] = content
        rows.append(row)
    label_evaluation_rows(rows, sets)
    total = index.find_page(offset=0, count=0).total
    return {
        "rows": {"rows": rows, "matching": len(rows), "total": total},
        "trajectories": trajectories,
    }


def _describe_page(page: str, key: str, describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception as error:  # boundary: the page shows it, and the others are written
        return {key: run_pages.explain_page_error(page, error)}


def _render_html(data: str) -> str:
    """Return the page with its style, scripts and data in it; it may run and load nothing else."""
    html = read_static_file("index.html").decode()
    names = re.findall(r'<script src="(.+)"></script>\n', html)
    script = "\n".join(read_static_file(name).decode() for name in names)
    style = read_static_file("style.css").decode()
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_hash_source(script)}'; style-src '{_hash_source(style)}'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    # Escaped in JSON, so that no text can end the element of the data.
    data = data.replace("<", "\\u003c")
    html = html.replace('<link rel="stylesheet" href="style.css">', head)
    before, after = re.split(r'(?:<script src=".+"></script>\n)+', html)
    return (
        f'{before}<script type="application/json" id="report">{data}</script>\n'
        f"<script>{script}</script>\n{after}"
    )


def _hash_source(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
