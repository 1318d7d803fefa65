"""What a fork server copies of the trainer is safe to copy."""

import sys

from tests.support.commands import run_program, said_by

IMPORT = """
import os
import areal_hpc.trainer.job
import torch
from areal_hpc.jobs.processes.fork_server import is_fork_safe

assert is_fork_safe()
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
child = os.fork()
if child == 0:
    assert not torch.cuda._is_in_bad_fork()
    square = torch.rand(600, 600, requires_grad=True)
    (square @ square).sum().backward()
    os._exit(17)
print("a rank ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_importing_the_trainer_leaves_nothing_that_a_fork_would_break() -> None:
    said = said_by(run_program(sys.executable, "-W", "ignore", "-c", IMPORT))
    assert said.splitlines()[-1] == "a rank ended with 17"
