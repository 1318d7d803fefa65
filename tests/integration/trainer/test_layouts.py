"""Every parallel layout computes what transformers computes, and any layout resumes any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integration.trainer.reference_models import hf_model

REPOSITORY = Path(__file__).parents[3]
WORKER = "tests.integration.trainer.layout_worker"
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "dp2": {"dp": 2}}
ALL = [*LAYOUTS, "single"]
FAMILIES = ["qwen3", "qwen2", "llama"]

pytestmark = pytest.mark.timeout(300)

Findings = dict[str, dict[str, Any]]


def launch(folder: Path, parallel: dict[str, int], others: list[Path]) -> Findings:
    folder.mkdir()
    case = folder / "case.json"
    case.write_text(
        json.dumps({"parallel": parallel, "folder": str(folder), "others": list(map(str, others))})
    )
    ranks = next(iter(parallel.values()), 1)
    with (folder / "ranks.log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", WORKER, str(case)],
                cwd=REPOSITORY,
                env={**os.environ, "AREAL_HPC_RANK": str(rank), "AREAL_HPC_NUM_TASKS": str(ranks)},
                stdout=log,
                stderr=log,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * ranks, (folder / "ranks.log").read_text()[-5000:]
    found: Findings = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def findings(root: Path) -> dict[str, Findings]:
    """One launch a layout; the last one also resumes from the commits of all others."""
    found = {name: launch(root / name, parallel, []) for name, parallel in LAYOUTS.items()}
    found["single"] = launch(root / "single", {}, [root / name for name in LAYOUTS])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_logprobs_are_those_of_transformers(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    found = findings[layout][family]
    assert found["tokens"] == findings["single"][family]["tokens"] > 50
    assert found["micro_batches"] > 1
    assert found["logprob_gap"] <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_gradients_are_those_of_transformers(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    assert findings[layout][family]["gradient_gap"] <= 1e-4
    assert findings[layout][family]["norm_gap"] <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_export_is_the_loaded_model_bit_by_bit(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    found = findings[layout][family]
    assert found["export_is_exact"]
    assert found["specs_match"]
    assert found["missing"] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_the_step_after_a_resume_is_bitwise_the_same(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    assert findings[layout][family]["resume_is_bitwise"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_commit_of_any_layout_resumes_on_one_rank(
    findings: dict[str, Findings], family: str
) -> None:
    gaps = findings["single"][family]["from_other_layouts"]
    assert len(gaps) == len(LAYOUTS)
    # One AdamW step at lr 1e-3: a lost moment or step count would show as 1e-4 and more.
    assert max(gaps) <= 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_transformers_the_same_logits(
    findings: dict[str, Findings], root: Path, family: str
) -> None:
    original = hf_model(family)
    ids = torch.arange(30)[None]
    for layout in ALL:
        folder = root / layout / family / "saved"
        assert (folder / "model.safetensors.index.json").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(loaded(ids).logits, original(ids).logits), layout
