"""The frozen model below an adapter: a checkpoint has the adapter alone, and a digest of this."""

import hashlib
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.checkpoints import Checkpoint

SAMPLES, SAMPLE_BYTES = 64, 64 * 1024
"""Of each file: a digest of all bytes would take minutes."""


def digest_base(model_dir: Path) -> str:
    """A digest of a model's tensors: of their names, their places, and samples of their numbers."""
    digest = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            first = file.tell()
            for sample in range(SAMPLES):
                file.seek(first + (size - first) * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def require_same_base(checkpoint: Checkpoint, base: str) -> None:
    """Refuse an adapter of another model, and one in the place of all weights or the reverse.

    Raises:
        RecipeError: The checkpoint is not of what the recipe trains.
    """
    found, expected = (
        f"an adapter of the model {digest[:19]}" if digest else "all weights"
        for digest in (checkpoint.state.base, base)
    )
    if checkpoint.state.base != base:
        raise RecipeError(
            f"{checkpoint.path} has {found}, the recipe trains {expected}",
            key="trainer.lora",
            hint="go on with the model and the trainer.lora that the run began with",
        )
