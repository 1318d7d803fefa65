"""Command line that starts a job inside its container (Apptainer or Pyxis)."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.cluster import ContainerConfig
from areal_hpc.rundir.paths import ENVIRONMENTS

IMAGE_CHECKOUT_DIR = Path("/opt/areal_hpc")
"""Where the images of `slurm/containers` hold the checkout and its environments."""


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """Command that starts a job's Python in its container."""

    python: str
    """A shell command."""
    srun_args: tuple[str, ...] = ()
    """What srun must know for it."""


def build_container_command(
    container: ContainerConfig,
    role: str,
    python: str,
    *,
    mounted_paths: Sequence[Path],
    working_folder: Path,
    with_gpus: bool,
) -> ContainerCommand:
    """Python as the site's containers start it; `python` is the interpreter within them.

    Role `train` gets its image, every other that of `serve`. Inside, `mounted_paths` and the
    working folder have the same names.
    """
    if container.kind == "none":
        return ContainerCommand(shlex.quote(python))
    image = container.train if role == "train" else container.serve
    here = sorted({str(place) for place in (*mounted_paths, working_folder)})
    mounts = [*here, *container.mounts]
    if container.kind == "pyxis":
        _raise_if_pyxis_would_split(mounts)
        pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
        options = (
            f"--container-image={spell_pyxis_image(image)}",
            f"--container-mounts={','.join(pairs)}",
            f"--container-workdir={working_folder}",
        )
        return ContainerCommand(shlex.quote(python), options)
    command = ["apptainer", "exec", *(["--nv"] if with_gpus else [])]
    command += [f"--bind={mount}" for mount in mounts]
    return ContainerCommand(shlex.join([*command, f"--pwd={working_folder}", image, python]))


def spell_pyxis_image(image: str) -> str:
    """An image as pyxis tells files from registries: a file's name begins with `.` or `/`. Pure.

    Source: `spank_task_init` of pyxis's pyxis_slurmstepd.c (0.21), which enters the job's folder.
    """
    is_file = image.endswith((".sqsh", ".sqfs", ".squashfs"))
    return f"./{image}" if is_file and not image.startswith((".", "/")) else image


def _raise_if_pyxis_would_split(mounts: Sequence[str]) -> None:
    """Refuse paths that pyxis takes for several: it splits mounts at commas and at `:`.

    Flags come after a second `:` with `+` between them (`parse_mount_option` of its args.c).

    Raises:
        RecipeError: A mount has a comma, or more than a source, a place and flags.
    """
    for mount in mounts:
        if "," in mount or mount.count(":") > 2:
            raise RecipeError(
                f"expected HOST_PATH[:CONTAINER_PATH[:FLAG+FLAG]] without commas, got {mount}",
                key="cluster.slurm.container.mounts",
                hint="pyxis splits mounts there; name a path, or a link, without them",
            )


def get_image_python(role: str) -> str:
    return str(IMAGE_CHECKOUT_DIR / ".venvs" / ENVIRONMENTS[role] / "bin" / "python")
