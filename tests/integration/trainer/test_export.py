"""A checkpoint of any layout becomes a model that transformers and SGLang read alike."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors import safe_open

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.checkpoints.export import choose_checkpoint, export_checkpoint
from tests.integration.sglang_server import serving
from tests.integration.trainer.conftest import ALL
from tests.support.layout_launch import Findings
from tests.support.layout_worker import make_rows
from tests.support.parity_table import FAMILIES, LOGPROB_BOUND
from tests.support.reference_models import hf_model

pytestmark = pytest.mark.timeout(900)

FILE_BYTES = 64 * 1024


def export(root: Path, layout: str, family: str, out: Path) -> list[str]:
    """Export the only checkpoint of a launch; what was said on the way."""
    folder = root / layout / family
    said: list[str] = []
    checkpoint = choose_checkpoint(folder / "checkpoints", None)
    export_checkpoint(checkpoint, folder, out, said.append, file_bytes=FILE_BYTES)
    return said


def logprobs_of_rows(score: Any) -> list[float]:
    """Those of all scored tokens, row after row; `score` gives one row's, from its second token."""
    rows = make_rows(1)
    return [
        logprob
        for row in rows
        for logprob, is_scored in zip(score(row.input_ids_T), row.loss_mask_T[1:], strict=True)
        if is_scored
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ALL)
def test_transformers_scores_an_exported_checkpoint_as_the_trainer_did(
    findings: dict[str, Findings], root: Path, layout: str, family: str, tmp_path: Path
) -> None:
    said = export(root, layout, family, tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(said) == len(files) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32

    def score(ids_T: Any) -> list[float]:
        ids = torch.from_numpy(ids_T).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        chosen: list[float] = logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
        return chosen

    trained = findings[layout][family]["checkpoint_logprobs"]
    gaps = [abs(a - b) for a, b in zip(logprobs_of_rows(score), trained, strict=True)]
    assert max(gaps) <= LOGPROB_BOUND


def test_an_export_says_what_the_trainer_would_have_saved(
    findings: dict[str, Findings], root: Path, tmp_path: Path
) -> None:
    export(root, "TP2", "qwen3_moe", tmp_path / "model")
    saved = root / "TP2" / "qwen3_moe" / "saved"
    assert shapes(tmp_path / "model") == shapes(saved)


def shapes(model_dir: Path) -> dict[str, tuple[str, list[int]]]:
    found = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def test_the_weights_of_another_model_are_refused(
    findings: dict[str, Findings], root: Path, tmp_path: Path
) -> None:
    checkpoint = choose_checkpoint(root / "TP2" / "qwen3" / "checkpoints", None)
    other = root / "TP2" / "qwen3_moe"
    with pytest.raises(RecipeError, match="router"):
        export_checkpoint(checkpoint, other, tmp_path / "model", lambda line: None)
    assert not (tmp_path / "model").exists()


def test_a_step_without_a_checkpoint_is_told_apart(
    findings: dict[str, Findings], root: Path
) -> None:
    checkpoints = root / "1" / "llama" / "checkpoints"
    assert choose_checkpoint(checkpoints, 2).state.step == 2
    with pytest.raises(RecipeError, match="no checkpoint of step 7; the run holds 2"):
        choose_checkpoint(checkpoints, 7)


@pytest.fixture(scope="module")
def exported(
    findings: dict[str, Findings], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    export(root, "TP2", "qwen3", path)
    return path


def test_sglang_scores_an_exported_checkpoint_as_the_trainer_did(
    findings: dict[str, Findings], exported: Path
) -> None:
    log_path = exported.parent / "log"
    with serving(exported, log_path, "--skip-tokenizer-init", context_tokens=256) as url:

        def score(ids_T: Any) -> list[float]:
            request = {
                "input_ids": ids_T.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = httpx.post(f"{url}/generate", json=request, trust_env=False, timeout=60)
            entries = answer.raise_for_status().json()["meta_info"]["input_token_logprobs"]
            return [entry[0] for entry in itertools.islice(entries, 1, None)]

        served = logprobs_of_rows(score)
    trained = findings["TP2"]["qwen3"]["checkpoint_logprobs"]
    assert max(abs(a - b) for a, b in zip(served, trained, strict=True)) <= LOGPROB_BOUND


def test_the_names_are_those_of_transformers_own_checkpoint(
    findings: dict[str, Findings], root: Path, tmp_path: Path
) -> None:
    for family in FAMILIES:
        export(root, "1", family, tmp_path / family)
        hf_model(family).save_pretrained(tmp_path / f"{family}-by-transformers")
        assert shapes(tmp_path / family) == shapes(tmp_path / f"{family}-by-transformers")
