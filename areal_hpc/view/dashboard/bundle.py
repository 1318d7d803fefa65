"""A run's pages as a folder of files, to attach to a paper or a ticket: no server is needed."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.compare import fetch_states_of_runs
from areal_hpc.view.dashboard import run_pages
from areal_hpc.view.dashboard.app import (
    MEDIA_TYPE_BY_STATIC_FILE,
    encode_browser_json,
    read_static_file,
)
from areal_hpc.view.dashboard.evaluation_page import (
    build_evaluation_sets_page,
    label_evaluation_rows,
    list_set_names,
)
from areal_hpc.view.dashboard.timeline_page import describe_timeline
from areal_hpc.view.transcripts.row_index import RowIndex

MAX_BUNDLED_ROWS = 500


def write_bundle(run: RunPaths, folder: Path, cache_dir: Path) -> int:
    """Write a run's pages into a new folder; how many conversations they have.

    A page that cannot be made says why.

    Raises:
        RecipeError: The folder exists.
    """
    if folder.exists():
        raise RecipeError(f"{folder} exists", key="--bundle", hint="name another folder")
    unfinished = folder.with_name(f".{folder.name}.partial_{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        count, pages = _write_example_trajectories(run, unfinished / "rows", cache_dir)
        _write_pages(_describe_pages_without_rows(run) | pages, unfinished)
        unfinished.rename(folder)
    except BaseException:  # boundary: raised again, without a folder that looks whole
        shutil.rmtree(unfinished)
        raise
    return count


def _write_example_trajectories(
    run: RunPaths, folder: Path, cache_dir: Path
) -> tuple[int, dict[str, Any]]:
    index = RowIndex(run, cache_dir)
    sets = list_set_names(run, [])
    try:
        index.index_new_rows()
        rows = index.select_rows_of_each_kind(MAX_BUNDLED_ROWS)
        total = index.find_page(offset=0, count=0).total
        failures = index.count_failure_causes()
        folder.mkdir()
        for row in rows:
            name = f"{row['shard']}/{row['row']}"
            describe = partial(
                run_pages.describe_trajectory, run, index, row["shard"], row["row"], sets
            )
            content = _describe_or_explain(f"{name} of {run.root}", "problem", describe)
            _write_json_as_script(folder / f"{row['shard']}-{row['row']}.js", name, content)
    finally:
        index.close()
    label_evaluation_rows(rows, sets)
    pages = {
        "rows": {"rows": rows, "matching": len(rows), "total": total},
        "failures": failures,
    }
    return len(rows), pages


def _describe_pages_without_rows(run: RunPaths) -> dict[str, Any]:
    state = fetch_states_of_runs([run], QueuePoller())[0].run_state
    pages: dict[str, Callable[[], dict[str, Any]]] = {
        "timeline": lambda: describe_timeline(run, {}),
        "runs": lambda: {"place": "", "runs": [run_pages.describe_run(run, state)]},
        "overview": lambda: run_pages.describe_run_overview(run, state),
        "metrics": lambda: run_pages.describe_metrics(run),
        "evaluations": lambda: build_evaluation_sets_page(run),
    }
    return {
        name: _describe_or_explain(f"{name} of {run.root}", "error", describe)
        for name, describe in pages.items()
    }


def _write_pages(pages: Mapping[str, Any], folder: Path) -> None:
    for name in pages:
        _write_json_as_script(folder / f"{name}.data.js", name, pages[name])
    for name in MEDIA_TYPE_BY_STATIC_FILE:
        (folder / name).write_bytes(read_static_file(name))
    scripts = "".join(f'<script src="{name}.data.js"></script>\n' for name in pages)
    index_html = read_static_file("index.html").decode()
    marker = "<!-- data of a bundle -->"
    (folder / "index.html").write_text(
        index_html.replace(marker, f'<script src="bundle.js"></script>\n{scripts}')
    )
    (folder / "bundle.js").write_text(
        '"use strict";\nwindow.bundle = {};\nwindow.bundled = (name, content) => {\n'
        "  window.bundle[name] = content;\n};\n"
    )


def _describe_or_explain(
    page: str, key: str, describe: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    try:
        return describe()
    except Exception as error:  # boundary: the page says it, and the others are written
        return {key: run_pages.explain_page_error(page, error)}


def _write_json_as_script(path: Path, bundle_key: str, content: Any) -> None:
    path.write_bytes(
        b"bundled("
        + encode_browser_json(bundle_key)
        + b","
        + encode_browser_json(content)
        + b");\n"
    )
