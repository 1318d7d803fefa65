"""AReaL's `areal.utils.stats_logger` (log paths)."""

from pathlib import Path

from areal_hpc.areal.api.cli_args import StatsLoggerConfig
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths


class StatsLogger:
    """The part of AReaL's logger that scripts ask: metrics are written by the run itself."""

    @staticmethod
    def get_log_path(config: StatsLoggerConfig) -> str:
        """The folder of a run's logs, made if it is missing.

        Raises:
            RecipeError: The section does not name the run.
        """
        names = (config.fileroot, config.experiment_name, config.trial_name)
        if not all(names):
            raise RecipeError(
                "stats_logger needs fileroot, experiment_name and trial_name",
                key="stats_logger",
                hint="write fileroot: ${cluster.fileroot}, and so on",
            )
        root, *below = (str(name) for name in names)
        logs_dir = RunPaths(Path(root).expanduser().joinpath(*below)).logs_dir
        logs_dir.mkdir(parents=True, exist_ok=True)
        return str(logs_dir)
