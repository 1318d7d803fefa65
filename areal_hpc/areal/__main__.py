"""`python -m areal_hpc.areal script.py ...`: runs a script with the import hook for `areal`."""

import sys

from areal_hpc.areal.launcher.local import run_script_as_main
from areal_hpc.errors import RecipeError

if __name__ == "__main__":
    try:
        import areal_hpc.areal.import_hook  # noqa: F401  importing it installs the hook
    except RecipeError as error:
        sys.exit(f"error: {error}")
    sys.exit(run_script_as_main(sys.argv[1:]))
