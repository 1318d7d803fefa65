"""Main function of every process of a job (`python -m ... ENTRY CONFIG.json`).

Keep this module light: processes that need no torch must not import it.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_hpc.errors import (
    AgentError,
    ArealError,
    IdleError,
    LostTrainerRankError,
    RecipeError,
    SupersededTrainerError,
)
from areal_hpc.jobs.processes.native_call_threads import exit_beside_native_calls
from areal_hpc.jobs.processes.process_setup import (
    PROMETHEUS_VARIABLE,
    raise_open_file_limit,
    set_up_logging,
)
from areal_hpc.jobs.processes.process_ties import die_with_parent, exit_when_orphaned
from areal_hpc.jobs.processes.stack_dumps import answer_stack_requests
from areal_hpc.jobs.restarts import PERMANENT_EXIT_CODES
from areal_hpc.rundir.files import forbid_making
from areal_hpc.rundir.paths import RunPaths, get_process_error_path
from areal_hpc.rundir.telemetry.spans import log_spans_of_process, record_state_entry

PROCESS_MAIN = "areal_hpc.jobs.processes.process_main"
"""This module, for `python -m`."""
PARENT_VARIABLE = "AREAL_HPC_SUPERVISOR_PID"
"""Variable with the id of the parent, which the process does not outlive."""


def main() -> None:
    entry, config_path = sys.argv[1:3]
    run_entry(entry, Path(config_path), int(os.environ[PARENT_VARIABLE]))


def run_entry(entry: str, config_path: Path, parent: int) -> None:
    """Run an entry with its configuration as long as its parent lives."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it died before the prctl
        sys.exit(75)
    threading.Thread(target=exit_when_orphaned, args=(parent,), daemon=True).start()
    os.umask(os.umask(0o077) | 0o027)  # at least as strict as the supervisor's
    raise_open_file_limit()
    set_up_logging()
    answer_stack_requests()
    log = logging.getLogger(entry)
    config = json.loads(config_path.read_text())
    if "run_dir" in config:
        forbid_making(Path(config["run_dir"]))
    with (
        exit_beside_native_calls(),
        _log_spans(config, config_path),
        _serve_metrics(config, config_path),
    ):
        record_state_entry("start")
        _call_entry(entry, config_path, config, log)


def _log_spans(config: dict[str, Any], config_path: Path) -> AbstractContextManager[None]:
    if "run_dir" not in config:
        return nullcontext()
    name = f"{config_path.parent.name}-{config_path.stem}"
    return log_spans_of_process(RunPaths(Path(config["run_dir"])).spans(name))


def _serve_metrics(config: dict[str, Any], config_path: Path) -> AbstractContextManager[None]:
    if "run_dir" not in config or os.environ.get(PROMETHEUS_VARIABLE) != "1":
        return nullcontext()
    from areal_hpc.jobs.node import get_advertised_host
    from areal_hpc.rundir.telemetry.prometheus import serve_process_metrics

    paths = RunPaths(Path(config["run_dir"]))
    job, process = config_path.parent.name, config_path.stem
    return serve_process_metrics(paths, job, process, get_advertised_host())


def _call_entry(entry: str, config_path: Path, config: dict[str, Any], log: logging.Logger) -> None:
    try:
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(config)
    except Exception as caught:  # boundary: errors that do not explain themselves are raised again
        error = select_error_to_report(caught)
        if error is None:
            raise
        # The traceback of a collective that another rank broke would look like the cause, and an
        # agent's error contains the agent's traceback.
        log.error("%s", error, exc_info=not isinstance(error, (LostTrainerRankError, AgentError)))
        get_process_error_path(config_path).write_text(str(error))
        sys.exit(_get_exit_code(error))


def select_error_to_report(caught: BaseException) -> ArealError | ValidationError | None:
    """Return the error if it explains itself, or the decisive one of a group of such errors.

    Task groups wrap even a single failure, and several tasks may fail at once. The first error of
    the highest precedence is decisive. None: the error does not explain itself.
    """
    if isinstance(caught, (ArealError, ValidationError)):
        return caught
    if not isinstance(caught, BaseExceptionGroup):
        return None
    selected = [select_error_to_report(member) for member in caught.exceptions]
    errors = [error for error in selected if error is not None]
    return max(errors, key=_get_error_precedence) if len(errors) == len(selected) else None


def _get_error_precedence(error: ArealError | ValidationError) -> int:
    code = _get_exit_code(error)
    if code == SupersededTrainerError.exit_code:
        return 3
    if code in PERMANENT_EXIT_CODES:
        return 2
    return 0 if code in (LostTrainerRankError.exit_code, IdleError.exit_code) else 1


def _get_exit_code(error: ArealError | ValidationError) -> int:
    return error.exit_code if isinstance(error, ArealError) else RecipeError.exit_code


if __name__ == "__main__":
    main()
