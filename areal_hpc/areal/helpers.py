"""Small functions of AReaL's `areal.utils` that its scripts call."""

from pathlib import Path
from typing import Any

from areal_hpc.areal.api.cli_args import StatsLoggerConfig
from areal_hpc.areal.conversions import map_areal_module
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.user_functions import import_by_path
from areal_hpc.rundir.paths import RunPaths


def import_from_string(dotted_path: str) -> Any:
    """Import the object `package.module.name`; `areal.` stands for `areal_hpc.areal.`."""
    return import_by_path(map_areal_module(dotted_path))


def load_hf_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> Any:
    """Load the tokenizer of a model directory; the padding token defaults to its end token."""
    from transformers import AutoTokenizer  # takes seconds, and a login node may not have it

    options = {} if padding_side is None else {"padding_side": padding_side}
    tokenizer = AutoTokenizer.from_pretrained(
        model_name_or_path, use_fast=fast_tokenizer, **options
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class StatsLogger:
    """The part of AReaL's logger that scripts call; the run itself writes the metrics."""

    @staticmethod
    def get_log_path(config: StatsLoggerConfig) -> str:
        """Make the folder of a run's logs, and return its path."""
        names = (config.fileroot, config.experiment_name, config.trial_name)
        if not all(names):
            raise RecipeError(
                "stats_logger needs fileroot, experiment_name and trial_name",
                key="stats_logger",
                hint="write fileroot: ${cluster.fileroot}, and so on",
            )
        root, *subfolders = (str(name) for name in names)
        logs_dir = RunPaths(Path(root).expanduser().joinpath(*subfolders)).logs_dir
        logs_dir.mkdir(parents=True, exist_ok=True)
        return str(logs_dir)
