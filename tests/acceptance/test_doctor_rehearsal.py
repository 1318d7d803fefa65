"""`areal-hpc doctor --gpu` rehearsed on processors: the steps of GPUs, really run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import areal_hpc

pytestmark = pytest.mark.timeout(600)
RUN_TIMEOUT_S = 580.0


def test_a_rehearsal_runs_every_step_and_leaves_its_figures(tmp_path: Path) -> None:
    evidence, scratch = tmp_path / "doctor.json", tmp_path / "scratch"
    scratch.mkdir()
    words = ("doctor", "--gpu", "--device", "cpu", "--json", evidence)
    environ = {**os.environ, "TMPDIR": str(scratch)}
    ended = areal_hpc(*words, environ=environ, timeout_s=RUN_TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(evidence.read_text())
    verdicts = {one["name"]: one["verdict"] for one in told["results"]}
    steps = ("all-reduce", "tiny run")
    assert verdicts["rehearsal"] == "warn"
    assert [verdicts[name] for name in steps] == ["ok"] * len(steps), ended.stdout
    report: dict[str, Any] = told["gpu_nodes"][0]
    rates, run = report["node_rates"], report["run"]
    assert (rates["ranks"], rates["backend"], rates["wrong_elements"]) == (2, "gloo", 0)
    assert len(run["mean_gaps"]) == 2
    assert max(run["mean_gaps"]) < 1e-4
    assert min(run["gradient_norms"]) > 0
    assert not list(scratch.glob("areal-hpc-doctor-*"))
