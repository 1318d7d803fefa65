"""GPUs that a process of a job may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.cluster import WantedGpus

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES_DIR = Path("/dev")
DRIVER_GPUS_DIR = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of the machine, named by its PCI address, as in `0000:1b:00.0`."""
PCI_DEVICES_DIR = Path("/sys/bus/pci/devices")
_DEVICE_LIST_TERMINATORS = ("", "-1", "NoDevFiles")
"""Names in the variable that hide themselves and all after them; Slurm writes the last."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """GPUs that a machine shows."""

    ids: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES spells them: numbers, or names such as `GPU-8932f937-...`."""
    source: str
    """Source of the list, for a person."""


def find_visible_gpus(environ: Mapping[str, str], devices_dir: Path = DEVICES_DIR) -> VisibleGpus:
    """The GPUs that the variable names; if it is not set, those with a device file."""
    named = parse_visible_device_ids(environ)
    if named is not None:
        return VisibleGpus(
            named, f"{VISIBLE_DEVICES_VARIABLE}={environ[VISIBLE_DEVICES_VARIABLE]!r}"
        )
    # CUDA numbers the ones that it may open from 0; those of a container need not be named so.
    return VisibleGpus(
        tuple(map(str, range(len(list_device_files(devices_dir))))), f"{devices_dir}/nvidia[0-9]*"
    )


def parse_visible_device_ids(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that the variable names, each once; None if it is not set, which hides none."""
    if VISIBLE_DEVICES_VARIABLE not in environ:
        return None
    names = (name.strip() for name in environ[VISIBLE_DEVICES_VARIABLE].split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: name not in _DEVICE_LIST_TERMINATORS, names)))


def list_device_files(devices_dir: Path = DEVICES_DIR) -> list[Path]:
    return sorted(devices_dir.glob("nvidia[0-9]*"))


def select_wanted_gpus_or_raise(
    visible_gpus: VisibleGpus, wanted_gpus: WantedGpus, numa_node_by_gpu: Mapping[str, int]
) -> VisibleGpus:
    """Those of the visible GPUs that a run may use, in the order in which it takes them. Pure.

    GPUs of one NUMA node stand together where `numa_node_by_gpu` tells them: a replica or
    neighboring ranks then cross no socket that they need not. GPUs that the recipe lists keep
    its order.

    Raises:
        RecipeError: One that the recipe names is not visible, or there are fewer than it wants.
    """
    if wanted_gpus == "none":
        return VisibleGpus((), "cluster.gpus=none")
    if isinstance(wanted_gpus, tuple):
        names = tuple(map(str, wanted_gpus))
        if hidden := [name for name in names if name not in visible_gpus.ids]:
            raise RecipeError(
                f"cluster.gpus names GPUs {', '.join(hidden)}; this machine shows "
                f"{', '.join(visible_gpus.ids) or 'none'} ({visible_gpus.source})",
                key="cluster.gpus",
                hint="name some of those that it shows, or use cluster.gpus=auto",
            )
        return VisibleGpus(names, f"cluster.gpus=[{', '.join(names)}]")
    ordered = tuple(sorted(visible_gpus.ids, key=lambda one: numa_node_by_gpu.get(one, -1)))
    if wanted_gpus == "auto":
        return VisibleGpus(ordered, visible_gpus.source)
    if wanted_gpus > len(ordered):
        raise RecipeError(
            f"cluster.gpus={wanted_gpus}; "
            f"this machine shows {len(ordered)} GPUs ({visible_gpus.source})",
            key="cluster.gpus",
            hint=f"use cluster.gpus={len(ordered) or 'none'}",
        )
    return VisibleGpus(
        ordered[:wanted_gpus], f"cluster.gpus={wanted_gpus} of {visible_gpus.source}"
    )


def read_numa_node_by_gpu(
    devices_dir: Path = DEVICES_DIR, driver: Path = DRIVER_GPUS_DIR, pci: Path = PCI_DEVICES_DIR
) -> dict[str, int]:
    """The NUMA node of each GPU, by its number in the order of PCI addresses; empty if unknown.

    In a container that shows some of the machine's GPUs the numbers are others: unknown as well.
    """
    addresses = sorted(one.name for one in driver.glob("*"))
    if len(addresses) != len(list_device_files(devices_dir)):
        return {}
    try:
        told = [int((pci / address.lower() / "numa_node").read_text()) for address in addresses]
    except (OSError, ValueError):
        return {}
    return {str(number): node for number, node in enumerate(told)}
