"""Steps of an allocation: their srun command lines, and the jobs that run as such."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.scontrol import strip_job_variables
from areal_hpc.slurm.step_placement import StepPlacement
from areal_hpc.slurm.submit import JobHandle

SUPERVISOR_MODULE = "areal_hpc.jobs.supervisor"
TASKS_END_TIMEOUT_S = 120
"""Time between the ends of a step's first task and its last; then srun kills those left."""
KILL_TIMEOUT_S = 15.0
"""Time that srun gets to see that its tasks were killed."""


def build_step_command(
    placement: StepPlacement, job_id: str, step_name: str, python: str, launch: Path, output: Path
) -> list[str]:
    """The srun command line of a job's supervisors. `python` is a shell command.

    Steps share no processor, memory or GPU (`--exact`): Slurm shows each its own GPUs.
    """
    return [
        *("srun", f"--jobid={job_id}", f"--job-name={step_name}", "--exact"),
        *(f"--nodes={len(placement.nodes)}", f"--nodelist={','.join(placement.nodes)}"),
        *(f"--ntasks={placement.tasks}", f"--ntasks-per-node={placement.tasks_per_node}"),
        f"--cpus-per-task={placement.cpus_per_task}",
        *([f"--mem={placement.memory_mib_per_node}M"] if placement.memory_mib_per_node else []),
        f"--gres=gpu:{placement.gpus_per_node}" if placement.gpus_per_node else "--gres=none",
        *("--mpi=none", "--input=none", f"--wait={TASKS_END_TIMEOUT_S}", "--open-mode=append"),
        f"--output={output}",
        *(*shlex.split(python), "-u", "-m", SUPERVISOR_MODULE, str(launch)),
    ]


class SrunStepJob(JobHandle):
    """A job that runs as a step."""

    def __init__(self, launch: LaunchFile, job_id: str, step_name: str, command: Sequence[str]):
        super().__init__(launch, f"{job_id} {step_name}", launch.paths.steps_dir)
        self._allocation, self._step_name = job_id, step_name
        # In a session of its own: a Ctrl-C in the terminal is the launcher's to handle.
        self._srun = subprocess.Popen(
            # without what srun would take for wishes about the step
            command,
            env=strip_job_variables(os.environ),
            start_new_session=True,
        )

    def is_done(self) -> bool:
        return self._srun.poll() is not None

    def request_stop(self) -> None:
        if not self.is_done():
            self._srun.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        if self.is_done():
            return
        with contextlib.suppress(ClusterError):  # it ends with the allocation then
            shown = run_slurm_command(
                "squeue", "--steps", f"--jobs={self._allocation}", "--noheader", "--format=%i %j"
            )
            for line in shown.splitlines():
                step_id, _, name = line.partition(" ")
                if name.strip() == self._step_name:
                    run_slurm_command("scancel", "--signal=KILL", step_id)
        try:
            self._srun.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()
