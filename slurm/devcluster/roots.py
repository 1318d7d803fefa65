"""Slurm of another release beside the machine's own, unpacked by `make slurm-roots`.

A root's programs name their own loader and libraries: they run in the machine's own file system,
and so does what they start. Munge and MariaDB are the machine's, whatever the version.
"""

from pathlib import Path

from areal_hpc.checkout import find_checkout
from areal_hpc.errors import RecipeError
from areal_hpc.slurm.states import PROVEN_RELEASES, parse_release
from slurm.devcluster import processes

_PLUGIN_DIR = "usr/lib/x86_64-linux-gnu/slurm-wlm"


def find_slurm_root(version: str) -> str:
    """The folder with the Slurm of a version; empty where it is the machine's own.

    Raises:
        RecipeError: There is no such Slurm on this machine.
    """
    if not version:
        return ""
    checkout = find_checkout()
    if checkout and version in list_unpacked_versions(checkout):
        return str(checkout / ".roots" / version)
    if version == _read_own_version():
        return ""
    raise RecipeError(
        f"there is no Slurm {version} on this machine",
        key="--slurm",
        hint=f"make slurm-roots, or scripts/make_root.sh {version}"
        if checkout
        else "a checkout can unpack it (make slurm-roots); this was installed from a wheel",
    )


def list_unpacked_versions(checkout: Path) -> list[str]:
    """Versions that have a root in a checkout, oldest first."""
    return [
        version
        for version in PROVEN_RELEASES
        if (checkout / ".roots" / version / "bin" / "slurmctld").exists()
    ]


def get_programs_dir(slurm_root: str) -> str:
    return f"{slurm_root}/bin"


def get_plugin_dir(slurm_root: str) -> str:
    return f"{slurm_root}/{_PLUGIN_DIR}"


def _read_own_version() -> str:
    try:
        said = processes.run_command_unchecked(("slurmctld", "-V"), {}).stdout
    except FileNotFoundError:
        return ""
    return parse_release(said)
