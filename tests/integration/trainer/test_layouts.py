"""Every parallel layout computes as transformers does and resumes any other layout.

Transformers and SGLang read their checkpoints alike. A quick selection of docs/parity.md.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.checkpoints.export import choose_checkpoint, export_checkpoint
from tests.support import layouts
from tests.support.deadlines import scaled
from tests.support.layout_worker import make_rows
from tests.support.layouts import (
    GRADIENT_BOUND,
    LAYOUTS,
    LOGPROB_BOUND,
    MIXTURES,
    NORM_BOUND,
    RESUME_BOUND,
    Findings,
    check_routed,
    launch,
)
from tests.support.rank_server import RankServer
from tests.support.reference_models import hf_model
from tests.support.sglang_server import serving
from tests.support.thoroughness import choose

pytestmark = pytest.mark.timeout(900)

OTHERS = ("TP2", "PP2", "CP2", "DP2, EP2")
ALL = (*OTHERS, "1")
RESUMED_FROM = {"PP2": ("TP2",), "CP2": ("PP2",), "DP2, EP2": ("TP2", "PP2"), "1": OTHERS}
"""Earlier layouts whose checkpoints a layout resumes, by layout."""
ALL_CASES = [(layout, family) for layout in ALL for family in layouts.FAMILIES]
MIXTURE_CASES = [(layout, family) for layout in ALL for family in MIXTURES]
CASES = choose(ALL_CASES, *MIXTURE_CASES, ("TP2", "llama"), ("1", "llama"))
FILE_BYTES = 64 * 1024
Export = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def root(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one folder a layout, each of one launch, which also resumes checkpoints of others."""
    root = tmp_path_factory.mktemp("layouts")
    for name in ALL:
        others = [root / other for other in RESUMED_FROM.get(name, ())]
        families = [family for layout, family in CASES if layout == name]
        launch(ranks, root / name, LAYOUTS[name], families, others)
    return root


@pytest.fixture(scope="module")
def findings(root: Path) -> dict[str, Findings]:
    return {name: json.loads((root / name / "report.0.json").read_text()) for name in ALL}


@pytest.fixture(scope="module")
def exported(root: Path) -> Export:
    """Export the only checkpoint of a family in a layout, once, and return its folder."""

    @functools.cache
    def export(layout: str, family: str) -> Path:
        folder, lines = root / layout / family, list[str]()
        checkpoint = choose_checkpoint(folder / "checkpoints", None)
        out = folder / "exported"
        export_checkpoint(checkpoint, folder / "saved", out, lines.append, file_bytes=FILE_BYTES)
        assert len(lines) == len([*out.glob("*.safetensors")]) > 1
        return out

    return export


every_case = pytest.mark.parametrize(("layout", "family"), CASES)


@every_case
def test_layouts_match_reference(findings: dict[str, Findings], layout: str, family: str) -> None:
    finding = findings[layout][family]
    assert finding["tokens"] == findings["1"][family]["tokens"] > 50
    assert finding["micro_batches"] > 1
    assert finding["logprob_gap"] <= LOGPROB_BOUND
    assert finding["gradient_gap"] <= GRADIENT_BOUND
    assert finding["norm_gap"] <= NORM_BOUND
    # Weights pass through the layout and through a resume bit by bit; frozen, they score the same.
    assert finding["export_is_exact"]
    assert finding["specs_match"]
    assert finding["missing"] == []
    assert finding["resume_is_bitwise"]
    assert finding["frozen_is_exact"]
    check_routed(finding)


@every_case
def test_a_checkpoint_resumes_under_another_layout(
    findings: dict[str, Findings], layout: str, family: str
) -> None:
    resumed = findings[layout][family]["resumed_from"]
    others = [other for other in RESUMED_FROM.get(layout, ()) if (other, family) in CASES]
    assert sorted(resumed) == sorted(others)
    # One AdamW step at lr 1e-3: a lost moment or step count would show as 1e-4 and more.
    for other, gaps in resumed.items():
        assert gaps["weight_gap"] <= RESUME_BOUND, other
        assert gaps["loss_gap"] <= RESUME_BOUND, other


def test_layers_that_the_stages_do_not_divide(ranks: RankServer, tmp_path: Path) -> None:
    undivided, uneven = tmp_path / "whole", tmp_path / "uneven"
    # A tied embedding, on the first and the last stage; experts.
    families = choose(("llama", *MIXTURES), "llama")
    findings = launch(ranks, uneven, LAYOUTS["PP2, 3 layers"], families)
    resumed = launch(ranks, undivided, LAYOUTS["1, 3 layers"], families, [uneven])
    for family in families:
        finding = findings[family]
        assert finding["logprob_gap"] <= LOGPROB_BOUND
        assert finding["gradient_gap"] <= GRADIENT_BOUND
        assert finding["norm_gap"] <= NORM_BOUND
        assert finding["export_is_exact"]
        assert (finding["missing"], finding["resume_is_bitwise"]) == ([], True)
        assert max(resumed[family]["resumed_from"]["uneven"].values()) <= RESUME_BOUND


def test_an_export_where_the_middle_stages_have_more_layers(
    ranks: RankServer, tmp_path: Path
) -> None:
    finding = launch(ranks, tmp_path / "pp4", {"pp": 4, "layers": 6}, ("llama",))["llama"]
    assert finding["gradient_gap"] <= GRADIENT_BOUND
    assert finding["export_is_exact"]
    assert (finding["missing"], finding["resume_is_bitwise"]) == ([], True)


@every_case
def test_a_saved_model_gives_transformers_the_same_logits(
    root: Path, layout: str, family: str
) -> None:
    original = hf_model(family)
    ids = torch.arange(30)[None]
    folder = root / layout / family / "saved"
    assert (folder / "model.safetensors.index.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded(ids).logits, original(ids).logits)


def check_logprobs(expected: list[float], score: Callable[[np.ndarray], list[float]]) -> None:
    """Compare those of all scored tokens; `score` gives one row's, from its second token."""
    actual = [
        logprob
        for row in make_rows(1)
        for logprob, is_scored in zip(score(row.input_ids_T), row.loss_mask_T[1:], strict=True)
        if is_scored
    ]
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) <= LOGPROB_BOUND


@every_case
def test_transformers_scores_an_exported_checkpoint_as_the_trainer_did(
    findings: dict[str, Findings], exported: Export, layout: str, family: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(layout, family))
    assert model.dtype == torch.float32

    def score(ids_T: np.ndarray) -> list[float]:
        ids = torch.from_numpy(ids_T).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        chosen: list[float] = logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
        return chosen

    check_logprobs(findings[layout][family]["checkpoint_logprobs"], score)


@pytest.mark.thorough
def test_sglang_scores_an_exported_checkpoint_as_the_trainer_did(
    findings: dict[str, Findings], exported: Export, tmp_path: Path
) -> None:
    model = exported("TP2", "qwen3")
    with serving(model, tmp_path / "log", "--skip-tokenizer-init", context_tokens=256) as url:

        def score(ids_T: np.ndarray) -> list[float]:
            request = {
                "input_ids": ids_T.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = httpx.post(
                f"{url}/generate", json=request, trust_env=False, timeout=scaled(60)
            )
            entries = answer.raise_for_status().json()["meta_info"]["input_token_logprobs"]
            return [logprob for logprob, *_ in entries[1:]]

        check_logprobs(findings["TP2"]["qwen3"]["checkpoint_logprobs"], score)


def test_the_weights_of_another_model_are_refused(root: Path, tmp_path: Path) -> None:
    checkpoint = choose_checkpoint(root / "TP2" / "llama" / "checkpoints", None)
    other = root / "TP2" / "qwen3_moe"
    with pytest.raises(RecipeError, match="the checkpoint has"):
        export_checkpoint(checkpoint, other, tmp_path / "model", lambda line: None)
    assert not (tmp_path / "model").exists()
