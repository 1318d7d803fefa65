"""What scontrol shows of a job."""

import time

from areal_hpc.slurm.scontrol import parse_job_facts


def test_what_slurm_shows_of_a_job_is_read() -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795318302))
    shown = f"JobId=7 JobState=RUNNING Reason=None EndTime={end} ExcNodeList=n[01-02] A=b"
    facts = parse_job_facts(shown)
    assert (facts.state, facts.ends_at) == ("RUNNING", 1795318302.0)
    assert facts.excluded_nodes == "n[01-02]"
    facts = parse_job_facts("JobId=7 JobState=COMPLETING EndTime=Unknown ExcNodeList=(null)")
    assert (facts.state, facts.ends_at, facts.excluded_nodes) == ("COMPLETING", None, "")
    assert not facts.is_preempted
    assert not parse_job_facts("JobId=7 JobState=RUNNING PreemptTime=None").is_preempted
    assert parse_job_facts("JobId=7 JobState=RUNNING PreemptTime=2026-11-22T07:12:13").is_preempted
