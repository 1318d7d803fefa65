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
    steps = ("all-reduce", "trainer step", "SGLang", "engine, trainer", "weight update")
    assert verdicts["rehearsal"] == "warn"
    assert [verdicts[name] for name in steps] == ["ok"] * len(steps), ended.stdout
    report: dict[str, Any] = told["gpu_report"]
    rates, step, engine = report["node_rates"], report["step"], report["engine"]
    assert (rates["ranks"], rates["backend"], rates["wrong_elements"]) == (2, "gloo", 0)
    assert 0 < step["logprob_gap"] < 1e-4
    assert step["gradient_norm_gap"] < 1e-4
    assert engine["transport"] == "broadcast"
    assert engine["max_gap"] < 1e-3
    assert engine["updated_max_gap"] < 1e-3
    # Had the new weights not arrived, the gap would be as large as what the step changed.
    assert engine["change"] > 10 * engine["updated_max_gap"]
    assert {"transfer", "verify"} <= engine["update_s"].keys()
    assert not list(scratch.glob("areal-hpc-doctor-*"))
