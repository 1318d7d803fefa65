"""What `weights_worker` must find, on any device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

Findings = dict[str, Any]


def run_weights_worker(device: str, report: Path) -> Findings:
    """What the worker found, in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.weights_worker", device, str(report)]
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    if device == "cpu":
        environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, cwd=CHECKOUT, env=environ, check=True, timeout=scaled(400))
    found: Findings = json.loads(report.read_text())
    return found


def a_group_may_be_abandoned_in_a_send(found: Findings) -> None:
    assert found["group"]["sent"] == 2
    assert found["group"]["intact"]


def written_weights_are_those_of_the_device(found: Findings) -> None:
    assert found["files"]["gap"] <= 1e-4
    assert found["files"]["change"] > 10 * found["files"]["gap"]


WEIGHT_CHECKS = (
    a_group_may_be_abandoned_in_a_send,
    written_weights_are_those_of_the_device,
)
