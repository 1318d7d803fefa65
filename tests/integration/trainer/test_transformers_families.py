"""Decoders of transformers' own modules, packed and trained, compute as transformers does."""

import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import AdamConfig, LoraConfig, ParallelConfig
from areal_hpc.rundir.checkpoints import TrainerState, read_checkpoint_index
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.checkpoints.export import choose_checkpoint, export_checkpoint
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.families.architecture import (
    read_architecture,
    read_stored_parameters,
)
from areal_hpc.trainer.model.families.lora import ADAPTER_DIR
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf, save_hf_model
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.step import score_rows
from tests.support.layout_worker import make_rows, reference
from tests.support.layouts import (
    GRADIENT_BOUND,
    LAYOUTS,
    LOGPROB_BOUND,
    NORM_BOUND,
    RESUME_BOUND,
    Findings,
    check_routed,
    families_of,
    launch,
)
from tests.support.rank_server import RankServer
from tests.support.reference_models import ADAPTERS, SIZES, TRANSFORMERS_CONFIGS, hf_model
from tests.support.thoroughness import choose

pytestmark = pytest.mark.timeout(900)

# Latent attention and stacked experts with a bias that is not trained; sinks and windows; a state.
FAMILIES = choose(TRANSFORMERS_CONFIGS, "deepseek_v3", "gpt_oss", "qwen3_5")
ADAPTED = choose(ADAPTERS, "qwen3 LoRA")
RESUMED_FROM = {"1": (), "CP2": ("1",), "DP2": ("1",), "DP2 sharded": ("DP2",)}
each_family = pytest.mark.parametrize("family", FAMILIES)


REPRESENTATIVES = {"CP2": "deepseek_v3", "DP2": "qwen3_5", "DP2 sharded": "qwen3_5"}
"""Families that stand for the others, in layouts of two ranks."""


def list_families(layout: str) -> list[str]:
    families = [family for family in (*FAMILIES, *ADAPTED) if family in families_of(layout)]
    fewer = [REPRESENTATIVES[layout], *ADAPTED] if layout in REPRESENTATIVES else families
    return choose(families, *(family for family in families if family in fewer))


@pytest.fixture(scope="module")
def root(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for layout, others in RESUMED_FROM.items():
        launch(
            ranks,
            root / layout,
            LAYOUTS[layout],
            list_families(layout),
            [root / other for other in others],
        )
    return root


@pytest.fixture(scope="module")
def find(root: Path) -> Callable[[str], Findings]:
    @functools.cache
    def find(layout: str) -> Findings:
        report: Findings = json.loads((root / layout / "report.0.json").read_text())
        return report

    return find


@pytest.mark.parametrize("layout", RESUMED_FROM)
def test_layouts_match_transformers(find: Callable[[str], Findings], layout: str) -> None:
    findings = find(layout)
    assert [*findings] == list_families(layout)
    for family, finding in findings.items():
        assert finding["tokens"] > 50, family
        assert finding["micro_batches"] > 1, family
        assert finding["logprob_gap"] <= LOGPROB_BOUND, family
        assert finding["gradient_gap"] <= GRADIENT_BOUND, family
        assert finding["norm_gap"] <= NORM_BOUND, family
        assert (finding["export_is_exact"], finding["specs_match"], finding["missing"]) == (
            True,
            True,
            [],
        )
        assert (finding["resume_is_bitwise"], finding["frozen_is_exact"]) == (True, True), family
        check_routed(finding)
        for gaps in finding["resumed_from"].values():
            assert max(gaps.values()) <= RESUME_BOUND, family


@each_family
def test_a_checkpoint_becomes_a_model_that_transformers_reads(root: Path, family: str) -> None:
    folder = root / "1" / family
    checkpoint = choose_checkpoint(folder / "checkpoints", None)
    export_checkpoint(checkpoint, folder / "saved", folder / "exported", lambda line: None)
    names = {path.name for path in (folder / "exported").glob("*.safetensors")}
    assert names == {"model.safetensors"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    original = hf_model(family)
    buffers = dict(original.named_buffers())
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, buffers[name]), "training changes no buffer"
    counts = read_stored_parameters(folder / "exported")
    assert counts is not None
    trained = sum(parameter.numel() for parameter in original.parameters())
    biases = sum(tensor.numel() for name, tensor in buffers.items() if "score_correction" in name)
    assert counts.dense + counts.experts == trained + biases
    parameters = dict(original.named_parameters())
    moved = [
        name for name, data in loaded.named_parameters() if not torch.equal(data, parameters[name])
    ]
    assert len(moved) > len(parameters) / 2, "two steps were taken"


@pytest.mark.parametrize("name", ADAPTED)
def test_an_exported_adapter_is_what_peft_loads(
    root: Path, find: Callable[[str], Findings], name: str
) -> None:
    folder = root / "1" / name
    base, (_, settings) = folder / "base", ADAPTERS[name]
    lora = LoraConfig(rank=4, alpha=6, **settings)
    checkpoint = choose_checkpoint(folder / "checkpoints", None)
    written = read_checkpoint_index(checkpoint.path).tensors
    assert written
    assert all(".lora_" in tensor for tensor in written), "the base is not in it"
    export_checkpoint(checkpoint, base, folder / "exported", lambda line: None, lora=lora)
    rows = make_rows(1)
    logprobs = []
    for model in (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "exported"),
        load_with_peft(base, folder / "exported" / ADAPTER_DIR),
    ):
        for row in rows:
            row.channels["temperature"].fill(1.0)
        reference(model, rows)
        scored = [row.channels["expected"][1:][row.loss_mask_T[1:] != 0] for row in rows]
        logprobs.append(np.concatenate(scored))
        assert logprobs[-1] == pytest.approx(
            np.array(find("1")[name]["checkpoint_logprobs"]), abs=LOGPROB_BOUND
        )
    moved = root / "1" / name / "saved" / ADAPTER_DIR / "adapter_model.safetensors"
    assert moved.exists(), "the trainer exports it, too"
    shutil.copy(folder / "after_step_3" / "model.safetensors", base)
    with pytest.raises(RecipeError, match="the recipe trains an adapter of the model sha256"):
        export_checkpoint(checkpoint, base, folder / "other", lambda line: None, lora=lora)


def load_with_peft(base: Path, folder: Path) -> Any:
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "causal_conv1d_fn"])
def test_a_layer_that_looks_across_rows_is_refused(
    ranks: RankServer, tmp_path: Path, name: str
) -> None:
    outcome = ranks.call(check_a_leaking_family, RunPaths(tmp_path), 1, leaking=name)
    assert outcome.codes == [0], outcome.log


def check_a_leaking_family(scenario: dict[str, Any], paths: RunPaths) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from areal_hpc.trainer.model.families import transformers_modules

    config = json.dumps(hf_model("qwen3_5").config.to_dict())
    transformers_modules.check_packing(config, torch.device("cpu"))
    transformers_modules.check_packing.cache_clear()
    name = scenario["leaking"]
    original = getattr(modeling_qwen3_5, name)

    def leak(*args: Any, cu_seqlens: Any = None, cu_seq_lens_q: Any = None, **options: Any) -> Any:
        return original(*args, **options)

    leak.keeps_to_rows = True  # type: ignore[attr-defined]
    setattr(modeling_qwen3_5, name, leak)
    with pytest.raises(RecipeError, match="packed rows differ from rows alone"):
        transformers_modules.check_packing(config, torch.device("cpu"))


def test_a_family_that_scales_its_logits_in_a_way_of_its_own_is_refused(
    ranks: RankServer, tmp_path: Path
) -> None:
    outcome = ranks.call(check_scaled_logits, RunPaths(tmp_path))
    assert outcome.codes == [0], outcome.log


def check_scaled_logits(scenario: dict[str, Any], paths: RunPaths) -> None:
    from areal_hpc.trainer.model.families import transformers_modules

    transformers_modules.check_packing(
        json.dumps(hf_model("granite").config.to_dict()), torch.device("cpu")
    )
    config = json.dumps(transformers.CohereConfig(**SIZES, logit_scale=0.1).to_dict())
    with pytest.raises(RecipeError, match="packed rows differ from rows alone"):
        transformers_modules.check_packing(config, torch.device("cpu"))


IMAGE_MODELS = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", choose(IMAGE_MODELS, "qwen3_5_moe"))
def test_the_decoder_of_a_model_that_reads_images_is_trained(
    ranks: RankServer, tmp_path: Path, family: str
) -> None:
    outcome = ranks.call(train_beside_a_tower, RunPaths(tmp_path), family=family)
    assert outcome.codes == [0], outcome.log


def train_beside_a_tower(scenario: dict[str, Any], paths: RunPaths) -> None:
    kind, tower = IMAGE_MODELS[scenario["family"]]
    text = hf_model(scenario["family"])
    whole_class = getattr(transformers, kind)
    config = whole_class.config_class(
        text_config=text.config.to_dict(), vision_config=tower, tie_word_embeddings=False
    )
    reference = whole_class(config).float()
    source = paths.root / "source"
    reference.save_pretrained(source)

    policy = build_policy(
        read_architecture(source), ParallelConfig(), torch.float32, torch.device("cpu")
    )
    load_hf(policy, HfModelReader(source).read_tensor)
    rows = make_rows(1)
    for row in rows:
        row.channels["temperature"].fill(1.0)
    scores = score_rows(policy, rows, minibatch_count=1, max_tokens=90)
    for row, logprobs_T in zip(rows, scores, strict=True):
        ids = torch.from_numpy(row.input_ids_T).long()
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0].numpy()
        scored = row.loss_mask_T[1:].astype(bool)
        assert np.abs(logprobs_T[1:] - expected)[scored].max() <= LOGPROB_BOUND

    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.add_(0.125)
    save_hf_model(policy, source, paths.root / "exported")
    (before, after) = (
        load_file(paths.root / name / "model.safetensors") for name in ("source", "exported")
    )
    assert before.keys() == after.keys()
    files = policy.arch.parameters
    assert files is not None
    for name, tensor in before.items():
        is_decoder = name.startswith((files.prefix, files.head))
        assert torch.equal(after[name], tensor + 0.125 if is_decoder else tensor), name


def test_buffers_of_a_bfloat16_model_keep_their_precision(
    ranks: RankServer, tmp_path: Path
) -> None:
    outcome = ranks.call(export_in_bfloat16, RunPaths(tmp_path))
    assert outcome.codes == [0], outcome.log


def export_in_bfloat16(scenario: dict[str, Any], paths: RunPaths) -> None:
    source = paths.root / "source"
    hf_model("glm4_moe").save_pretrained(source)
    arch = read_architecture(source)
    policy = build_policy(arch, ParallelConfig(), torch.bfloat16, torch.device("cpu"))
    load_hf(policy, HfModelReader(source).read_tensor)
    save_hf_model(policy, source, paths.root / "saved")
    store = CheckpointStore(paths.checkpoints_dir, keep=2)
    state = TrainerState(step=1, generation=1, seed=0)
    store.begin_save(policy, build_optimizer(policy, AdamConfig()), state)
    store.finish_save()
    store.close()
    checkpoint = choose_checkpoint(paths.checkpoints_dir, None)
    export_checkpoint(checkpoint, source, paths.root / "exported", lambda line: None)
    before = load_file(source / "model.safetensors")
    for folder in ("saved", "exported"):
        after = load_file(paths.root / folder / "model.safetensors")
        for name, tensor in before.items():
            is_bias = name.endswith("e_score_correction_bias")
            assert torch.equal(after[name], tensor if is_bias else tensor.bfloat16()), name
