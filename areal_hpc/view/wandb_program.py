"""Tracker program of Weights & Biases: write an offline run, which `wandb sync` uploads later.

It runs in a Python of its own with wandb and the standard library; `sync.py` has the format of its
standard input. All parts have one run id, so `wandb sync` makes one run of them.
"""

import json
import os
import sys
from typing import Any

STEP_METRIC = "step"
"""Axis of every metric, logged beside it: wandb's own step counter takes no late values."""


def write_offline_run(program_input: dict[str, Any], folder: str) -> None:
    os.environ.update(WANDB_DIR=folder, WANDB_MODE="offline", WANDB_SILENT="true")
    os.environ.update(WANDB_CONSOLE="off", WANDB_CACHE_DIR=folder, WANDB_DATA_DIR=folder)
    import wandb

    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, disable_git=True)
    run = wandb.init(
        dir=folder,
        id=program_input["id"],
        name=program_input["name"],
        project=program_input["project"] or None,
        config=program_input["config"],
        resume="allow",
        settings=settings,
    )
    run.define_metric("*", step_metric=STEP_METRIC)
    for row in program_input["rows"]:
        run.log({name: value for name, value in row.items() if isinstance(value, int | float)})
    run.finish()


if __name__ == "__main__":
    write_offline_run(json.load(sys.stdin), sys.argv[1])
