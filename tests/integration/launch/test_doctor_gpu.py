"""`areal-hpc doctor --gpu` rehearsed on processors: the steps of GPUs, really run."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.gpu.check_plan import build_check_plan
from areal_hpc.launch.doctor.gpu.measured_steps import (
    list_rank_gpus,
    measure_collectives,
)
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan
from areal_hpc.recipe.sections.cluster import SlurmConfig
from tests.support.commands import areal_hpc, write_program

pytestmark = pytest.mark.timeout(600)
RUN_TIMEOUT_S = 580.0


@pytest.fixture
def plan() -> GpuCheckPlan:
    return build_check_plan(None, SlurmConfig(), "cpu", 0)


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


def test_a_rank_that_fails_ends_the_others_and_says_why(plan: GpuCheckPlan, tmp_path: Path) -> None:
    script = 'if [ "$AREAL_HPC_RANK" = 1 ]; then echo "CudaError: no kernel image"; exit 3; fi\n'
    python = write_program(tmp_path / "python", f"{script}exec sleep 300\n")
    broken = msgspec.structs.replace(plan, pythons={**plan.pythons, "train": str(python)})
    with pytest.raises(ClusterError, match="rank 1 exited with code 3: CudaError: no kernel image"):
        measure_collectives(broken, list_rank_gpus(broken, ()), tmp_path / "collectives")
