"""Choice of a runtime by its name."""

from collections.abc import Callable

from areal_hpc.sandbox.bubblewrap_command_line import find_bubblewrap
from areal_hpc.sandbox.runtime import Runtime
from areal_hpc.sandbox.runtimes.apptainer import ApptainerRuntime, find_apptainer
from areal_hpc.sandbox.runtimes.bwrap import BwrapRuntime
from areal_hpc.sandbox.runtimes.enroot import EnrootRuntime, find_enroot
from areal_hpc.sandbox.runtimes.host import HostRuntime
from areal_hpc.sandbox.runtimes.podman import PodmanRuntime, find_podman_with_crun

_RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "bwrap": BwrapRuntime,
    "podman": PodmanRuntime,
    "apptainer": ApptainerRuntime,
    "enroot": EnrootRuntime,
    "none": HostRuntime,
}


def make_runtime(isolation_name: str) -> Runtime:
    return _RUNTIMES[isolation_name]()


def find_installed_runtimes() -> list[str]:
    found = {
        "bwrap": find_bubblewrap() is not None,
        "podman": find_podman_with_crun() is not None,
        "apptainer": find_apptainer() is not None,
        "enroot": find_enroot() is not None,
        "none": True,
    }
    return [name for name, is_here in found.items() if is_here]
