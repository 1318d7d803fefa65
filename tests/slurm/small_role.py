"""What the jobs of `operated.py` run: a supervisor, and a process that does one thing."""

import os
import signal
import sys
import time
from typing import Any

from areal_hpc.jobs.supervisor import run_job


def role(config: dict[str, Any]) -> None:
    """What the processes of these jobs do."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 INFO works", flush=True)
    match config["does"]:
        case "raises":
            if os.environ["AREAL_HPC_RANK"] == "1":
                raise ValueError("the loss is not a number")
            time.sleep(600)
        case "grows":
            kept = [b"x" * (64 << 20) for _ in range(32)]
            print(len(kept))
        case "checkpoints":
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("saved"))
            time.sleep(600)
        case "ignores":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)


if __name__ == "__main__":
    run_job(sys.argv[1])
