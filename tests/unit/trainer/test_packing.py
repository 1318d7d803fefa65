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
    held = np.concatenate([part.input_ids_T for part in parts])
    expected = np.concatenate([np.zeros(0), *(one.input_ids_T for one in rows)])
    assert sorted(held[held > 0]) == sorted(expected)


@given(LENGTHS, SPLITS)
def test_scored_tokens_are_predicted_from_before_and_name_their_sequence(
    lengths: list[int], split: PackParallelism
) -> None:
    rows = [row(length, seed) for seed, length in enumerate(lengths)]
    found = []
    for rank in range(split.cp):
        pack = build_pack(rows, ("place",), PackParallelism(split.tp, split.cp, rank))
        places = pack.channels_N["place"]
        # A channel is that of the predicted token; its position follows the one it is read at.
        assert (pack.positions_T[pack.logit_places_N] + 1 == places).all()
        labels, numbers = pack.labels_N.tolist(), pack.rows_N.tolist()
        found += list(zip(numbers, labels, places.tolist(), strict=True))
    expected = [
        (number, int(token), float(place))
        for number, one in enumerate(rows)
        for place, (token, scored) in enumerate(zip(one.input_ids_T, one.loss_mask_T, strict=True))
        if scored and place > 0
    ]
    assert sorted(found) == sorted(expected)


def test_a_pack_without_rows_is_a_filler_that_is_scored_nowhere() -> None:
    pack = build_pack([], ("place",), PackParallelism(tp=2, cp=2))
    assert len(pack.input_ids_T) == 2
    assert len(pack.logit_places_N) == 0


@given(LENGTHS, SPLITS)
def test_predicted_tokens_keep_what_could_be_sampled_in_their_place(
    lengths: list[int], split: PackParallelism
) -> None:
    rows = [row(length, seed) for seed, length in enumerate(lengths)]
    for number in range(0, len(rows), 2):  # the others know of nothing that was left out
        generator = np.random.default_rng(number)
        counts = generator.integers(0, 4, lengths[number]).astype(np.uint16)
        ids = generator.integers(0, 1000, int(counts.sum())).astype(np.int32)
        rows[number] = replace(rows[number], sampling_mask=SamplingMask(counts, ids))
    found = 0
    for rank in range(split.cp):
        pack = build_pack(rows, ("place",), PackParallelism(split.tp, split.cp, rank))
        if pack.sampling_mask_N is None:
            assert all(one.sampling_mask is None for one in rows)
            continue
        pieces = np.split(
            pack.sampling_mask_N.ids, np.cumsum(pack.sampling_mask_N.counts_T.astype(int))
        )[:-1]
        places = zip(pack.rows_N, pack.channels_N["place"], pieces, strict=True)
        for number, place, piece in places:
            mask = rows[number].sampling_mask
            if mask is None:
                assert not len(piece)
                continue
            end = int(mask.counts_T[: int(place) + 1].sum())
            assert piece.tolist() == mask.ids[end - mask.counts_T[int(place)] : end].tolist()
            found += len(piece)
    counted = [
        int(one.sampling_mask.counts_T[1:][one.loss_mask_T[1:] != 0].sum())
        for one in rows
        if one.sampling_mask is not None
    ]
    assert found == sum(counted)
