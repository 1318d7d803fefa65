"""A checkpoint of a run as a model directory that transformers and SGLang load. One process."""

from collections.abc import Callable
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from areal_hpc.rundir.checkpoints import Checkpoint, list_checkpoints
from areal_hpc.trainer.checkpoints.stored_tensors import open_stored_tensors
from areal_hpc.trainer.checkpoints.weights_reader import CheckpointWeights
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.hf_files import MAX_FILE_BYTES, write_or_replace_hf_model_dir


def choose_checkpoint(directory: Path, step: int | None) -> Checkpoint:
    """The newest complete checkpoint, or that of one step.

    Raises:
        RecipeError: There is none.
    """
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        raise RecipeError(
            "the run has no complete checkpoint yet",
            key=str(directory),
            hint="wait for the first, or lower trainer.checkpoint_every_steps",
        )
    if step is None:
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if checkpoint.state.step == step:
            return checkpoint
    held = ", ".join(str(checkpoint.state.step) for checkpoint in checkpoints)
    raise RecipeError(
        f"there is no checkpoint of step {step}; the run holds {held}",
        key=str(directory),
        hint=f"choose one of {held}; trainer.keep_checkpoints says how many are kept",
    )


def export_checkpoint(
    checkpoint: Checkpoint,
    model_path: Path,
    target_dir: Path,
    print_line: Callable[[str], None],
    *,
    file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights of a checkpoint, with `model_path`'s configuration and tokenizer.

    Raises:
        RecipeError: The checkpoint is of another model.
        ShardError: The checkpoint is damaged.
        ClusterError: It vanished while it was read.
    """

    def progress(done_bytes: int, total_bytes: int) -> None:
        print_line(f"wrote {done_bytes / 2**20:,.1f} of {total_bytes / 2**20:,.1f} MiB")

    try:
        with open_stored_tensors(checkpoint.path) as stored:
            weights = CheckpointWeights(stored, read_architecture(model_path), checkpoint.path)
            write_or_replace_hf_model_dir(
                weights.read_tensors(), weights.list_tensor_specs(), model_path, target_dir,
                file_bytes=file_bytes, on_file=progress,
            )  # fmt: skip
    except FileNotFoundError as error:
        raise ClusterError(
            f"a file vanished while it was read: {error.filename}",
            key=str(checkpoint.path),
            hint="a running trainer deletes old checkpoints: export a newer one",
        ) from error
