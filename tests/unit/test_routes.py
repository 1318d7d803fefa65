"""Routes of a mixture's tokens, from the engine's reply to a pack and its metrics."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.proxy.completion.reply import join_replies
from areal_hpc.proxy.engine.generation import Generation
from areal_hpc.session.call_records import find_client_reported_field_defect
from areal_hpc.session.export import EpisodeKey, build_training_rows
from areal_hpc.session.tree import InteractionTree, VersionSpan
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.trainer.batch.batch_metrics import summarize_expert_loads
from areal_hpc.trainer.batch.packing import PackParallelism, TrainingRow, build_pack
from areal_hpc.wire.trajectory import (
    MixtureShape,
    RecordedRoutes,
    RouteArray,
    TrajectoryRow,
    find_row_defect,
    parse_mixture_shape,
    record_engine_routes,
)
from tests.support.sample_trajectories import trajectory
from tests.unit.session.model_stub import ENCODER, assistant, say, user

SMALL = MixtureShape(layers=2, per_token=2, experts=5)
LARGE = MixtureShape(layers=2, per_token=3, experts=300)


def number_routes(mixture: MixtureShape, tokens: int, first: int = 0) -> RouteArray:
    """Make routes that show the positions of their tokens."""
    routes = mixture.make_routes(tokens)
    places = first + np.arange(tokens)[:, None, None]
    routes[:] = (places + np.arange(mixture.per_token)) % mixture.experts
    return routes


@pytest.mark.parametrize("mixture", [SMALL, LARGE])
def test_what_the_engine_said_is_packed_in_one_or_two_bytes(mixture: MixtureShape) -> None:
    routes = number_routes(mixture, 7)
    for array in (routes.astype("u1"), routes.astype("<u2")):  # in as few bytes as the ids need
        packed = record_engine_routes(mixture, array.tobytes(), 7)
        assert packed is not None
        assert len(packed.packed) == routes.nbytes
        assert np.array_equal(packed.unpack(), routes)
        assert record_engine_routes(mixture, array.tobytes(), 9) is None
    unsound = routes.astype("<u2")
    unsound[3, 1, 0] = mixture.experts
    assert record_engine_routes(mixture, unsound.tobytes(), 7) is None


def test_a_row_joins_the_routes_of_its_turns() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "one")
    second = say(tree, [user("a"), assistant("one"), user("b")], "two")
    whole = number_routes(SMALL, second.num_sequence_tokens)
    cut = first.num_sequence_tokens - 1
    first.routes = RecordedRoutes(SMALL, whole[:cut].tobytes())
    second.routes = RecordedRoutes(SMALL, whole[cut:-1].tobytes())
    second.reward = 1.0
    (row,) = build_training_rows(tree, EpisodeKey(1, 0, 0))
    assert row.routes_TLK is not None
    assert np.array_equal(row.routes_TLK[:-1], whole[:-1])
    assert (row.routes_TLK[-1] == 255).all()
    first.routes = None
    (row,) = build_training_rows(tree, EpisodeKey(1, 0, 0))
    assert row.routes_TLK is not None
    assert (row.routes_TLK[:cut] == 255).all()
    assert np.array_equal(row.routes_TLK[cut:-1], whole[cut:-1])
    assert "expected no routes" in str(find_client_reported_field_defect(second))


def test_a_reply_of_two_replicas_keeps_what_the_first_one_said() -> None:
    def reply(ids: list[int], routes: bytes) -> Generation:
        return Generation(
            text=ENCODER.decode(ids), output_ids=ids, logprobs=[-1.0] * len(ids),
            spans=[VersionSpan(1, 0, len(ids))], finish_reason="abort",
            ends_with_stop_token=False, stop_text=None, cached_tokens=0, top_logprobs=[],
            routes=routes,
        )  # fmt: skip

    ids = ENCODER.encode("hello world")
    for before, expected in ((b"aaaa", b"aaaabbbbcccc"), (b"", b"xxxxbbbbcccc")):
        assert join_replies(reply(ids, before), reply(ids, b"xxxxbbbbcccc")).routes == expected


@pytest.mark.parametrize("mixture", [SMALL, LARGE])
def test_a_shard_keeps_them_beside_rows_without_any(mixture: MixtureShape, tmp_path: Path) -> None:
    rows = [trajectory(number, tokens=4 + number) for number in range(3)]
    routed = [
        dataclasses.replace(row, routes_TLK=number_routes(mixture, row.num_tokens))
        for row in rows[::2]
    ]
    shard = write_sealed_shard([routed[0], rows[1], routed[1]], tmp_path / "s", tmp_path / "i", "w")
    reader = ShardReader(tmp_path / "s" / shard.file)
    read_rows = reader.read_rows([2, 0, 1])
    for row, expected in zip(read_rows, [routed[1], routed[0]], strict=False):
        assert row.routes_TLK is not None
        assert expected.routes_TLK is not None
        assert row.routes_TLK.dtype == expected.routes_TLK.dtype
        assert np.array_equal(row.routes_TLK, expected.routes_TLK)
        assert find_row_defect(row) is None
    assert read_rows[2].routes_TLK is not None
    assert np.array_equal(read_rows[2].routes_TLK, mixture.make_routes(5))
    cut = dataclasses.replace(read_rows[0], routes_TLK=read_rows[1].routes_TLK)
    assert "expected routes of" in str(find_row_defect(cut))
    plain = write_sealed_shard(rows, tmp_path / "s", tmp_path / "i", "w")
    assert ShardReader(tmp_path / "s" / plain.file).read_rows([0])[0].routes_TLK is None


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_pack_cuts_them_as_it_cuts_tokens(cp: int) -> None:
    rows = []
    for length in (9, 3, 20):
        ids = np.arange(1, length + 1, dtype=np.int32)
        routes = None if length == 3 else number_routes(SMALL, length)
        rows.append(TrainingRow(ids, np.ones(length, np.uint8), {}, None, routes))
    for rank in range(cp):
        pack = build_pack(rows, (), PackParallelism(cp=cp, cp_rank=rank))
        assert pack.routes_TLK is not None
        lengths = [*map(int, pack.padded_lengths)]
        row_T = np.repeat([0, 1, 2], [length // cp for length in lengths])
        for index, (number, position) in enumerate(zip(row_T, pack.positions_T, strict=True)):
            row_routes = rows[number].routes_TLK
            is_known = row_routes is not None and position < len(row_routes)
            expected = row_routes[position] if is_known else SMALL.make_routes(1)[0]
            assert np.array_equal(pack.routes_TLK[index], expected)
    assert build_pack(rows[1:2], (), PackParallelism()).routes_TLK is None


def test_loads_leave_out_what_is_unknown_and_layers_without_experts() -> None:
    mixture = MixtureShape(layers=3, per_token=2, experts=4)
    routes = mixture.make_routes(5)
    routes[:4, 0] = 0  # a dense layer
    routes[:4, 1] = [[0, 1], [0, 1], [0, 1], [0, 2]]
    routes[:4, 2] = [[0, 1], [2, 3], [0, 1], [2, 3]]
    row: TrajectoryRow = dataclasses.replace(trajectory(tokens=5), routes_TLK=routes)
    metrics = summarize_expert_loads([row, trajectory(tokens=5)], mixture)
    assert metrics == {"experts/load_max_over_mean": 2.0, "experts/unvisited": 1}
    assert summarize_expert_loads([trajectory()], mixture) == {}
    assert summarize_expert_loads([row], None) == {}


def test_configurations_name_a_mixture_in_three_ways() -> None:
    sizes = {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        config = sizes | {name: 8}
        for variant in (config, {"text_config": config}):
            assert parse_mixture_shape(variant) == MixtureShape(4, 2, 8)
    assert parse_mixture_shape(sizes) is None
