"""GPUs that a process of a job may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES_DIR = Path("/dev")
_NO_GPU_VALUES = ("", "-1", "NoDevFiles")
"""Names in the variable that hide themselves and all after them; Slurm writes the last."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """GPUs that a machine shows."""

    ids: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES spells them: numbers, or names such as `GPU-8932f937-...`."""
    source: str
    """Source of the list, for a person."""


def find_visible_gpus(environ: Mapping[str, str], dev: Path = DEVICES_DIR) -> VisibleGpus:
    """The GPUs that the variable names; if it is not set, those with a device file."""
    named = parse_visible_devices(environ)
    if named is not None:
        return VisibleGpus(
            named, f"{VISIBLE_DEVICES_VARIABLE}={environ[VISIBLE_DEVICES_VARIABLE]!r}"
        )
    # CUDA numbers the ones that it may open from 0; those of a container need not be named so.
    return VisibleGpus(tuple(map(str, range(len(list_device_files(dev))))), f"{dev}/nvidia[0-9]*")


def parse_visible_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that the variable names, each once; None if it is not set, which hides none."""
    if VISIBLE_DEVICES_VARIABLE not in environ:
        return None
    names = (name.strip() for name in environ[VISIBLE_DEVICES_VARIABLE].split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: name not in _NO_GPU_VALUES, names)))


def list_device_files(dev: Path = DEVICES_DIR) -> list[Path]:
    """NVIDIA's device files, one per GPU."""
    return sorted(dev.glob("nvidia[0-9]*"))
