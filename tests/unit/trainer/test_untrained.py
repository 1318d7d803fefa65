import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import UntrainableBatchError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.checkpoints import QuarantineCause, UntrainedBatchPart
from areal_hpc.trainer.batch.training_rows import build_rows
from areal_hpc.trainer.batch.untrained import (
    build_norm_metrics,
    check_trainable_share,
    count_untrainable_tokens,
    forbid_end_tokens,
    is_optimizer_step_taken,
    list_sampling_distortions,
    record_damaged_batch,
    record_skipped_steps,
)
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_episodes import MadeUpTurn, build_batch


def judge(
    norms: list[float], step: int, earlier: list[UntrainedBatchPart]
) -> list[UntrainedBatchPart]:
    return record_skipped_steps(
        norms, step, earlier,
        key="trainer.optimizer.lr", name_step="batch {}".format, hint="try something",
    )  # fmt: skip


def streak(norms: list[float]) -> list[UntrainedBatchPart]:
    """Judge successive batches of one optimizer step; return those that are not trained."""
    parts: list[UntrainedBatchPart] = []
    for step, norm in enumerate(norms, 1):
        parts += judge([norm], step, parts)
    return parts


RUN = Path("/my runs/a")


def quarantined(step: int, cause: QuarantineCause = "damaged") -> UntrainedBatchPart:
    return UntrainedBatchPart(step, "reason", quarantine=cause)


def test_streaks_of_gradients_of_damage_and_of_requests_are_apart() -> None:
    odd, requested = UntrainedBatchPart(5, "the gradient norm is nan"), quarantined(5, "requested")
    for between in (odd, requested):
        assert record_damaged_batch(6, [quarantined(4), between], "gone", RUN).step == 6
    assert judge([math.nan], 6, [UntrainedBatchPart(4, "nan"), quarantined(5)])[0].step == 6


def test_steps_that_are_not_taken_are_counted_by_their_norms() -> None:
    assert [*map(is_optimizer_step_taken, (1.0, 0.0, math.inf, math.nan))] == [
        True,
        False,
        False,
        False,
    ]
    assert build_norm_metrics([0.5, 2.0]) == {
        "grad_norm": 2.0, "step/skipped": 0, "step/nonfinite": 0,
    }  # fmt: skip
    assert build_norm_metrics([]) == {"grad_norm": 0.0, "step/skipped": 1, "step/nonfinite": 0}
    warm_up = {"grad_norm": 0.0, "step/skipped": 0, "step/nonfinite": 0}
    assert build_norm_metrics([0.0, 0.0], were_due=False) == warm_up
    for odd in (math.nan, math.inf):
        metrics = build_norm_metrics([1.0, 0.0, odd, 2.0])
        assert (metrics["step/skipped"], metrics["step/nonfinite"]) == (2, 1)
        assert not math.isfinite(metrics["grad_norm"])


PLAIN = {"temperature": 0.7, "max_new_tokens": 5}


def list_of(**overrides: Any) -> list[str]:
    """List the distortions in the proxy's record of a call with these parameters."""
    sampling = SamplingParams(**{**PLAIN, **overrides})
    return list(list_sampling_distortions(msgspec.json.decode(msgspec.json.encode(sampling))))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"temperature": 0.0}, "temperature=0"),
        ({"top_p": 0.99}, "top_p"),
        ({"top_k": 1}, "top_k"),
        ({"min_p": 0.05}, "min_p"),
        ({"regex": "a*"}, "a grammar"),
        ({"json_schema": "{}"}, "a grammar"),
        ({"ebnf": "root ::= x"}, "a grammar"),
        ({"structural_tag": "{}"}, "a grammar"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_whatever_reshapes_the_softmax_is_named(asked: dict[str, Any], named: str) -> None:
    assert list_of(**asked) == [named]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.3, "stop": ["x"], "stop_token_ids": [3], "sampling_seed": 5},
        {"top_k": 100_000_000, "logit_bias": {}, "ignore_eos": True, "skip_special_tokens": False},
    ],
)
def test_the_plain_softmax_is_trainable(asked: dict[str, Any]) -> None:
    assert list_of(**asked) == []
    assert list(list_sampling_distortions({})) == []  # shards without the record


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reply_whose_mask_is_recorded_of_every_token_stays_in_the_loss(is_whole: bool) -> None:
    nucleus = {**PLAIN, "top_p": 0.9}
    row, _ = sample([PLAIN, nucleus], [PLAIN, PLAIN])
    counts = np.array([0, 0, 0, 0, 1, is_whole], np.uint16)
    ids = row.input_ids_T[np.flatnonzero(counts)]
    row = replace(row, sampling_mask=SamplingMask(counts, ids))
    built = build_rows([row], WeightVersion(1, 0), [GenerationFork(1, 0)], ObjectiveConfig())[0]
    assert built.loss_mask_T.tolist() == [0, 1, 1, 0, is_whole, is_whole]
    assert built.sampling_mask is row.sampling_mask
    assert count_untrainable_tokens([row]).total() == (0 if is_whole else 2)


def test_tokens_that_a_least_length_forbade_are_out_of_the_distribution() -> None:
    least = {**PLAIN, "min_new_tokens": 1, "stop_token_ids": [3, 7]}
    row, _ = sample([least, {**least, "min_new_tokens": 5}], [PLAIN, PLAIN])
    mask = forbid_end_tokens(row)
    assert mask is not None
    assert mask.forbids_T is not None
    assert mask.counts_T.tolist() == [0, 2, 0, 0, 2, 2]
    assert mask.ids.tolist() == [3, 7] * 3
    assert mask.forbids_T.tolist() == [False, True, False, False, True, True]
    recorded = SamplingMask(np.array([0, 1, 0, 0, 0, 0], np.uint16), row.input_ids_T[1:2])
    both = forbid_end_tokens(replace(row, sampling_mask=recorded))
    assert both is not None
    assert both.ids.tolist() == [row.input_ids_T[1], 3, 7, 3, 7]
    assert count_untrainable_tokens([row]).total() == 0
    assert list_of(min_new_tokens=1) == ["min_new_tokens"]


def sample(*of_rows: Sequence[dict[str, Any]]) -> list[TrajectoryRow]:
    """Make two episodes of two turns of two tokens each, whose calls had these parameters."""
    turns = [[MadeUpTurn(9, 0.5), MadeUpTurn(0, reward)] for reward in (1.0, 0.0)]
    rows = build_batch([turns], ExportSettings())
    sampled = []
    for row, samplings in zip(rows, of_rows, strict=True):
        calls = [
            msgspec.structs.replace(call, sampling=sampling)
            for call, sampling in zip(row.record.calls, samplings, strict=True)
        ]
        sampled.append(replace(row, record=msgspec.structs.replace(row.record, calls=calls)))
    return sampled


GREEDY = {"temperature": 0.0}
MIXED = ([PLAIN, GREEDY], [{**GREEDY, "top_p": 0.5}, PLAIN])


def test_tokens_are_counted_by_reason() -> None:
    counts = count_untrainable_tokens(sample(*MIXED))
    assert counts == {"temperature=0": 2, "temperature=0 and top_p": 2}
    assert count_untrainable_tokens(sample([PLAIN] * 2, [PLAIN] * 2)).total() == 0


def test_half_of_a_batch_may_be_left_out_and_no_more() -> None:
    check_trainable_share(3, 10, {"top_p": 5})
    check_trainable_share(3, 0, {})
    with pytest.raises(UntrainableBatchError, match="batch 3: 6 of 10 sampled tokens") as caught:
        check_trainable_share(3, 10, {"top_p": 2, "temperature=0": 4})
    (problem,) = caught.value.problems
    assert problem.key == "rollout.agent.sampling"
    assert "temperature=0 (4), top_p (2)" in problem.message
    assert problem.hint.startswith("set it to recipe")
    assert caught.value.exit_code == 78
