"""Which of the jobs that were laid at submission wait for a job to fail."""

from areal_hpc.rundir.jobs import Submission, get_latest_submissions, list_waiting_successors


def laid(job_id: str, successor: int = 0, job: str = "trainer") -> Submission:
    return Submission(job, job_id, 1, 0.0, "job.sbatch", successor=successor)


def waiting(submissions: list[Submission]) -> list[str]:
    return [one.job_id for one in list_waiting_successors(submissions, "trainer")]


def test_a_successor_counts_once_it_has_taken_the_place() -> None:
    chain = [laid("1"), laid("5", job="cell-0"), laid("2", 1), laid("3", 2), laid("4", 3)]
    assert get_latest_submissions(chain)["trainer"].job_id == "1"
    assert waiting(chain) == ["2", "3", "4"]
    chain.append(laid("3"))  # the first never got as far
    assert get_latest_submissions(chain)["trainer"].job_id == "3"
    assert waiting(chain) == ["4"]
    chain.append(laid("6", 4))
    assert waiting(chain) == ["4", "6"]


def test_another_submission_of_the_job_has_successors_of_its_own() -> None:
    assert waiting([laid("1"), laid("2", 1), laid("3")]) == []
    assert waiting([laid("1"), laid("2", 1), laid("3"), laid("4", 1)]) == ["4"]
