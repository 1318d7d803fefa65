"""A trainer rank that ends beside a group that it gave up has the exit code of its own end."""

from pathlib import Path

from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from tests.support.deadlines import scaled
from tests.support.process_commands import start_job_process

PATIENCE_S = 120.0


def test_a_stop_beside_a_group_that_was_given_up_is_a_stop(tmp_path: Path) -> None:
    config, log = tmp_path / "config.json", tmp_path / "log"
    config.write_text("{}")
    process = start_job_process("tests.support.ending_sender:run", config, log)
    try:
        assert process.wait(scaled(PATIENCE_S)) == STOPPED_EXIT_CODE, log.read_text()
    finally:
        process.kill()
    assert "a member reported failure" in log.read_text()
