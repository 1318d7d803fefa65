"""What is read of a run's jobs, wherever the run lies and whatever its jobs do meanwhile."""

from pathlib import Path

from areal_hpc.rundir.jobs import Submission, TaskExit, write_task_exit
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueueSnapshot
from areal_hpc.view.inspection import find_slurm_output_files, read_exit_records
from areal_hpc.view.state.jobs import JobView, RunJobs


def test_the_output_of_a_job_is_found_below_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    found = [folder / "12_0_log.out", folder / "12_1_log.out"]
    for path in found:
        path.touch()
    script = folder / "job.sbatch"
    script.write_text(
        f"#SBATCH --output='{folder}/%j_0_log.out'\nsrun --output '{folder}/%j_%t_log.out' python\n"
    )
    assert find_slurm_output_files(Submission("trainer", "12", 1, 0.0, str(script))) == found


def test_an_exit_that_a_new_start_has_just_removed_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    exits = {rank: TaskExit(70) for rank in (0, 1)}
    write_task_exit(paths.job("trainer"), 1, exits[1])
    run = RunJobs(paths, (JobView("trainer", None, None, exits),), QueueSnapshot(), ())
    assert [one.rank for one in read_exit_records(run)] == [1]
