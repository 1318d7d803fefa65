"""Interpreters that say they have what a role needs: real ones take a second each to say so."""

import json
from pathlib import Path

from areal_hpc.launch.checks.role_python import MODULES_BY_ROLE
from areal_hpc.rundir.paths import ROLES
from tests.support.commands import write_program


def stand_in_pythons(folder: Path) -> tuple[str, ...]:
    """Overrides of a recipe whose runs are checked and not started."""
    modules = {name: "" for names in MODULES_BY_ROLE.values() for name in names}
    said = json.dumps({"version": "3.11.0", "packages": {}, "cuda": None, "modules": modules})
    # Other questions are about the user's code, with which nothing is wrong.
    script = f"case \"$*\" in *find_spec*) echo '{said}';; *) echo null;; esac"
    write_program(folder / "stand_in_python", script)
    return tuple(f"cluster.{role}.python={folder / 'stand_in_python'}" for role in ROLES)
