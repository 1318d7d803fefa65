"""Main function of every process of a job (`python -m ... ENTRY CONFIG.json`).

Keep this module light: the writer of checkpoints, which must not import torch, uses it too.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from pydantic import ValidationError

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.jobs.die_with_parent import die_with_parent, exit_when_orphaned
from areal_hpc.jobs.environment import raise_file_limit, set_up_logging
from areal_hpc.rundir.paths import get_process_error_path


def main() -> None:
    """Run one entry with its configuration; exit with the code of the error it raised."""
    entry, config_path = sys.argv[1:3]
    die_with_parent(signal.SIGTERM)
    parent = int(os.environ["AREAL_HPC_SUPERVISOR_PID"])
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(75)
    threading.Thread(target=exit_when_orphaned, args=(parent,), daemon=True).start()
    raise_file_limit()
    set_up_logging()
    log = logging.getLogger(entry)
    config = json.loads(Path(config_path).read_text())
    try:
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(config)
    except Exception as caught:  # boundary: whatever is not ours to explain is raised again
        error: BaseException = caught  # task groups wrap even a single failure
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if not isinstance(error, (ArealError, ValidationError)):
            raise
        log.error("%s", error, exc_info=True)
        get_process_error_path(Path(config_path)).write_text(str(error))
        # A configuration that does not validate will not validate at the next start either.
        sys.exit(getattr(error, "exit_code", RecipeError.exit_code))


if __name__ == "__main__":
    main()
