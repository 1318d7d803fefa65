"""`python -m areal_hpc.areal.launcher.local script.py --config ...`: run a training script.

AReaL's launcher starts servers, and then the script beside them. Here the script's own
`PPOTrainer` starts all jobs of a run, so this launcher only runs the script.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.errors import ArealError, RecipeError, escape_controls


def run_script_as_main(argv: Sequence[str]) -> int:
    """Run `script.py arguments...`, or `-m module arguments...`, as Python would.

    Returns:
        The exit code. Errors of areal_hpc are printed as `areal-hpc` prints them.
    """
    try:
        _run_script(list(argv))
    except ArealError as error:
        sys.stderr.write(escape_controls(f"error: {error}\n"))
        return int(getattr(error, "code", error.exit_code))
    return 0


def _run_script(argv: list[str]) -> None:
    if argv[:1] == ["-m"] and len(argv) > 1:
        sys.argv = argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    if not argv or not Path(argv[0]).is_file():
        raise RecipeError(
            f"expected a script, got {argv[0] if argv else 'nothing'!r}",
            hint="python -m areal_hpc.areal.launcher.local train.py --config config.yaml",
        )
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(run_script_as_main(sys.argv[1:]))
