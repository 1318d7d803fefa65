"""Stop a run once it has trained a step, as a cluster would, and start it again.

python examples/preemption/preempt.py recipes/quickstart.yaml [key=value ...]

The same command goes on from the last checkpoint. `areal-hpc audit` then accounts for every ticket.
Under Slurm no command is needed: a preempted job has itself requeued.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths

COMMAND = (sys.executable, "-m", "areal_hpc")


def newest_step(paths: RunPaths) -> int:
    rows = read_readable_records(paths.metrics)
    return int(rows[-1]["step"]) if rows else -1


def main(recipe: Path, overrides: list[str]) -> None:
    paths = RunPaths(load_recipe(recipe, overrides).run_dir.resolve())
    command = [*COMMAND, "run", str(recipe), *overrides]
    running = subprocess.Popen(command)
    while newest_step(paths) < 1:
        if running.poll() is not None:
            sys.exit(f"the run ended before its first step, with code {running.returncode}")
        time.sleep(0.2)
    running.send_signal(signal.SIGTERM)
    running.wait()
    print(f"preempted after step {newest_step(paths)}", flush=True)
    subprocess.run(command, check=True)
    print(f"went on to step {newest_step(paths)}", flush=True)
    subprocess.run([*COMMAND, "audit", str(paths.root)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
