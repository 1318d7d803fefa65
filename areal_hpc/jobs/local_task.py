"""The launcher's side of a supervisor on this machine: what `SlurmTask` is under Slurm."""

from collections.abc import Mapping

from areal_hpc.jobs.topology import TaskPosition
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, LaunchFile, TaskExit, write_task_exit
from areal_hpc.rundir.lock import is_lock_held


class LocalTask:
    """The launcher's side of a supervisor on this machine."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position

    def join_start(self) -> TaskExit | None:
        """Nothing stands in the way."""
        return None

    def probe_node(self) -> TaskExit | None:
        """The launcher's own node is as it is."""
        return None

    def build_environment(self) -> Mapping[str, str]:
        """Nothing to know."""
        return {}

    def find_stop_reason(self, *, is_leading: bool) -> TaskExit | None:
        """A stop when nobody holds the launcher's lock: the kernel drops it however it died."""
        lock = self._launch.launcher_lock
        if lock is None or is_lock_held(lock):
            return None
        return TaskExit(STOPPED_EXIT_CODE, reason="the launcher is gone")

    def decide_stop_grace_s(self, outcome: TaskExit) -> float:
        """Seconds that processes get to stop by themselves."""
        return self._launch.stop_grace_s

    def finish(self, outcome: TaskExit) -> TaskExit:
        """Tell the launcher."""
        write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome
