"""Successors: jobs laid at submission that start one after the other when a job fails.

Slurm starts and removes them by their dependencies alone, so they also work where jobs may ask
Slurm for nothing: where sbatch is forbidden on compute nodes (AllocNodes), and in containers.
"""

from collections.abc import Sequence


def build_options_to_start_after_failure(
    awaited_job_ids: Sequence[str], dependency: str = ""
) -> list[str]:
    """Options of sbatch for a job that starts once all `awaited_job_ids` jobs have failed. Pure.

    `awaited_job_ids` are the job and the successors before this one: when one of them ends well,
    Slurm removes this one. `dependency` is what the job itself waits for, in sbatch's words.
    """
    failures = f"afternotok:{':'.join(awaited_job_ids)}"
    # Slurm cannot mix conditions that must all hold with such of which one is enough. Without the
    # latter the successor looks for the end of the stage before when it starts.
    conditions = [failures] if "?" in dependency else [dependency, failures]
    return [f"--dependency={','.join(filter(None, conditions))}", "--kill-on-invalid-dep=yes"]


def build_dependency_on_job_or_successors(chain: Sequence[str]) -> str:
    """Slurm's way to say that a job, or one of its successors, must have succeeded. Pure.

    `chain` has the number of the job, then those of its successors.
    """
    return "?".join(f"afterok:{job_id}" for job_id in chain)


def build_job_id_placeholders(job: str, successors: int) -> list[str]:
    own = f"{job.upper()}_JOBID"
    return [own, *(f"{job.upper()}_SUCCESSOR_{place}_JOBID" for place in range(1, successors + 1))]
