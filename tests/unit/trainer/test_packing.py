"""Sequences are packed for ranks with their masks."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer.batch.packing import (
    PackParallelism,
    TrainingRow,
    build_pack,
    compute_padded_length,
    plan_packs,
)
from areal_hpc.wire.trajectory import SamplingMask

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=30)
SPLITS = st.builds(PackParallelism, tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2, 4]))


def row(length: int, seed: int = 0) -> TrainingRow:
    generator = np.random.default_rng((seed, length))
    return TrainingRow(
        generator.integers(1, 1000, length).astype(np.int32),
        generator.integers(0, 2, length).astype(np.uint8),
        {"place": np.arange(length, dtype=np.float32)},
    )


@given(LENGTHS, st.integers(1, 5), st.integers(1, 100), SPLITS)
def test_every_sequence_is_packed_once_and_ranks_get_equally_many_packs(
    lengths: list[int], ranks: int, max_tokens: int, split: PackParallelism
) -> None:
    plan = plan_packs(lengths, ranks=ranks, max_tokens=max_tokens, parallelism=split)
    assert len(plan) == ranks
    assert len({len(packs) for packs in plan}) == 1
    assert len(plan[0]) >= 1
    everything = [pack for packs in plan for pack in packs]
    assert sorted(index for pack in everything for index in pack) == list(range(len(lengths)))
    for pack in everything:
        size = sum(compute_padded_length(lengths[index], split) for index in pack)
        assert size <= max_tokens or len(pack) == 1, "over the limit is one sequence alone"


@given(LENGTHS, SPLITS)
def test_context_ranks_hold_every_token_once(lengths: list[int], split: PackParallelism) -> None:
    rows = [row(length, seed) for seed, length in enumerate(lengths)]
    parts = [
        build_pack(rows, ("place",), PackParallelism(split.tp, split.cp, rank))
        for rank in range(split.cp)
    ]
    total = int(parts[0].padded_lengths.sum())
    assert total % split.pack_multiple == 0
    assert total - sum(lengths) < len(lengths) * split.sequence_multiple + split.pack_multiple + 1
    assert {len(part.input_ids_T) for part in parts} == {total // split.cp}
    packed = np.concatenate([part.input_ids_T for part in parts])
    expected = np.concatenate([np.zeros(0), *(row.input_ids_T for row in rows)])
    assert sorted(packed[packed > 0]) == sorted(expected)


@given(LENGTHS, SPLITS)
def test_scored_tokens_name_their_sequence(lengths: list[int], split: PackParallelism) -> None:
    rows = [row(length, seed) for seed, length in enumerate(lengths)]
    labeled = []
    for rank in range(split.cp):
        pack = build_pack(rows, ("place",), PackParallelism(split.tp, split.cp, rank))
        places = pack.channels_N["place"]
        # A channel belongs to the predicted token, whose position follows the one it is read at.
        assert (pack.positions_T[pack.logit_indices_N] + 1 == places).all()
        labels, numbers = pack.labels_N.tolist(), pack.rows_N.tolist()
        labeled += list(zip(numbers, labels, places.tolist(), strict=True))
    expected = [
        (number, int(token), float(index))
        for number, row in enumerate(rows)
        for index, (token, scored) in enumerate(zip(row.input_ids_T, row.loss_mask_T, strict=True))
        if scored and index > 0
    ]
    assert sorted(labeled) == sorted(expected)


def test_a_pack_without_rows_is_a_filler_that_is_scored_nowhere() -> None:
    pack = build_pack([], ("place",), PackParallelism(tp=2, cp=2))
    assert len(pack.input_ids_T) == 2
    assert len(pack.logit_indices_N) == 0


@given(LENGTHS, SPLITS)
def test_predicted_tokens_keep_masks_in_place(lengths: list[int], split: PackParallelism) -> None:
    rows = [row(length, seed) for seed, length in enumerate(lengths)]
    for number in range(0, len(rows), 2):  # the other rows have no mask
        generator = np.random.default_rng(number)
        counts = generator.integers(0, 4, lengths[number]).astype(np.uint16)
        ids = generator.integers(0, 1000, int(counts.sum())).astype(np.int32)
        rows[number] = replace(rows[number], sampling_mask=SamplingMask(counts, ids))
    count = 0
    for rank in range(split.cp):
        pack = build_pack(rows, ("place",), PackParallelism(split.tp, split.cp, rank))
        if pack.sampling_mask_N is None:
            assert all(row.sampling_mask is None for row in rows)
            continue
        pieces = np.split(
            pack.sampling_mask_N.ids, np.cumsum(pack.sampling_mask_N.counts_T.astype(int))
        )[:-1]
        places = zip(pack.rows_N, pack.channels_N["place"], pieces, strict=True)
        for number, index, piece in places:
            mask = rows[number].sampling_mask
            if mask is None:
                assert not len(piece)
                continue
            end = int(mask.counts_T[: int(index) + 1].sum())
            assert piece.tolist() == mask.ids[end - mask.counts_T[int(index)] : end].tolist()
            count += len(piece)
    counted = [
        int(row.sampling_mask.counts_T[1:][row.loss_mask_T[1:] != 0].sum())
        for row in rows
        if row.sampling_mask is not None
    ]
    assert count == sum(counted)
