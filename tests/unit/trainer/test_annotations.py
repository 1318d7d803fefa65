"""Annotations of a step: whole groups of rows, their outcomes, and their files."""

import math
from pathlib import Path

import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import (
    AnnotationWriter,
    RowAnnotation,
    StepAnnotations,
    find_row_annotation,
    read_annotations,
)
from areal_hpc.trainer.annotations import (
    MAX_ROWS_IN_SAMPLED_MODE,
    TOKEN_MEASURE_NAMES,
    annotate_row,
    choose_rows_to_annotate,
    describe_skipped_step,
)
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.view.dashboard.run_pages import build_token_columns
from tests.support.deadlines import scaled
from tests.support.full_disk import full_disk
from tests.support.sample_trajectories import trajectory


def test_a_sample_is_of_whole_groups_drawn_by_the_seed() -> None:
    batch = [trajectory(ticket, episode) for ticket in range(40) for episode in range(6)]
    drawn = [choose_rows_to_annotate(batch, "sampled", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == MAX_ROWS_IN_SAMPLED_MODE // 6 * 6
    tickets = {batch[index].ticket_id for index in drawn[0]}
    assert drawn[0] == [index for index, row in enumerate(batch) if row.ticket_id in tickets]
    assert choose_rows_to_annotate(batch, "all", 1) == list(range(240))
    assert choose_rows_to_annotate(batch, "off", 1) == []
    large = [trajectory(ticket, episode) for ticket in range(2) for episode in range(100)]
    assert len(choose_rows_to_annotate(large, "sampled", 1)) == 100, "a group is never cut"


@pytest.mark.parametrize(
    ("norm", "outcome"),
    [
        (0.5, "trained"),
        (0.0, "the gradient was zero: the step was not taken"),
        (math.inf, "the gradient was not finite: the step was not taken"),
    ],
)
def test_a_row_whose_step_was_not_taken_is_not_called_trained(norm: float, outcome: str) -> None:
    batch = [trajectory(episode=episode) for episode in range(3)]
    advantages = (1.0, 0.0, 1.0)
    rows = [
        TrainingRow(
            row.input_ids_T,
            row.loss_mask_T,
            {Channel.ADVANTAGE: np.full(row.num_tokens, advantage, np.float32)},
        )
        for row, advantage in zip(batch, advantages, strict=True)
    ]
    untaken = describe_skipped_step(norm, critic_warms_up=False)
    built = []
    for index, (stored, row) in enumerate(zip(batch, rows, strict=True)):
        measures = np.zeros((len(TOKEN_MEASURE_NAMES), stored.num_tokens), np.float32)
        measures[-1] = index < 2  # a pass saw the first two
        names = ("cell-0-000001.h5", index)
        built.append(annotate_row(names, stored, row, measures, ObjectiveConfig(), untaken))
    assert [annotation.outcome for annotation in built] == [outcome, "no advantage", "masked"]


def make_step(step: int, tokens: int = 3) -> StepAnnotations:
    row = RowAnnotation(
        shard="cell-0-000001.h5",
        row=7,
        outcome="trained",
        advantage=0.5,
        advantages=np.full(tokens, 0.5, "<f2").tobytes(),
        logprobs=np.full(tokens, -1.25, "<f4").tobytes(),
        entropies=np.array([np.nan] * tokens, "<f2").tobytes(),
        ratios=np.full(tokens, 1.0, "<f2").tobytes(),
        reasons=bytes([4] * tokens),
    )
    return StepAnnotations(step=step, generation=1, rows_of_batch=9, rows=[row])


def write(paths: RunPaths, step: StepAnnotations, **bounds: int) -> None:
    writer = AnnotationWriter(paths, **bounds)
    writer.start_write(step)
    writer.close(timeout_s=scaled(30))


def test_what_is_written_is_shown_by_token(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, make_step(3))
    annotation = find_row_annotation(paths, 3, "cell-0-000001.h5", 7)
    assert annotation is not None
    assert find_row_annotation(paths, 3, "cell-0-000001.h5", 8) is None
    assert find_row_annotation(paths, 4, "cell-0-000001.h5", 7) is None
    shown = build_token_columns(annotation, [0, 1, 0, 1, 1])
    assert shown["logprobs"] == [None, -1.25, None, -1.25, -1.25]
    assert shown["entropies"] == [None] * 5
    assert shown["reasons"] == ["", "clipped", "", "clipped", "clipped"]


def test_a_full_disk_leaves_them_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with full_disk(1000):
        write(paths, make_step(3, tokens=1000))
    assert read_annotations(paths, 3) is None
    assert [*paths.annotations_dir.iterdir()] == []
    paths.annotation(3).write_bytes(b"cut")
    assert read_annotations(paths, 3) is None
