"""An update of an adapter alone reaches a real SGLang."""

from pathlib import Path
from typing import Any

import peft
import torch

from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.weights.update import UpdateReport
from areal_hpc.wire.weight_version import WeightVersion
from tests.integration.weights.test_publish import (
    TOKENS,
    assert_serves,
    begin_generation_at_pause,
    trainer,
)
from tests.support.deadlines import scaled
from tests.support.inference_cell import Cell, logprob_error, running_cell, tiny_qwen3
from tests.support.update_faults import gates
from tests.support.weight_updates import probe_of, publish, raise_if_failed

LORA = LoraConfig(rank=4, alpha=6, rslora=True, sync="adapter")


def make_adapted_model(seed: int) -> Any:
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, use_rslora=True, target_modules="all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )  # fmt: skip
    adapted = peft.get_peft_model(tiny_qwen3(0), config)
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


def send(publisher: Any, cell: Cell, step: int, adapted: Any) -> UpdateReport:
    report = publish(
        publisher, WeightVersion(cell.generation, step), peft.get_peft_model_state_dict(adapted),
        probe=probe_of(adapted),
    )  # fmt: skip
    raise_if_failed(report)
    return report


def test_an_adapter_alone_takes_the_place_of_weights(tmp_path: Path) -> None:
    old, new = (make_adapted_model(seed) for seed in (1, 2))
    all_parameters = sum(parameter.numel() for parameter in old.get_base_model().parameters())
    settings = {"lora": LORA.model_dump()}
    with running_cell(tmp_path / "run", tiny_qwen3(0), trainer=settings) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        with (
            gates([cell], tmp_path / "gates") as (gate,),
            trainer(cell, tmp_path / "gates") as publisher,
        ):
            before = send(publisher, cell, 0, old).version
            assert_serves(cell, 0, old, before)
            begun = begin_generation_at_pause(cell, gate)
            after = send(publisher, cell, 1, new).version
            assert_serves(cell, 0, new, after)
            prompt, coming = begun.result(0)
            reply = coming.result(scaled(60))
            torn = dict([*peft.get_peft_model_state_dict(old).items()][:2])
            lost = publish(publisher, WeightVersion(cell.generation, 2), torn, probe=probe_of(old))
            assert lost.failed, "a layer's matrix lacks its fellows"
            assert_serves(cell, 0, old, send(publisher, cell, 3, old).version)
    first, second = reply["meta_info"]["weight_versions"]
    assert [first["version"], second["version"]] == [str(before), str(after)]
    for adapted, span in ((old, slice(0, first["end"])), (new, slice(first["end"], TOKENS))):
        assert logprob_error(adapted, prompt, reply, span) <= 1e-4
    sent_parameters = sum(tensor.numel() for tensor in peft.get_peft_model_state_dict(new).values())
    assert sent_parameters < all_parameters / 4
