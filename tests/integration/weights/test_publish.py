"""Updates reach replicas in groups, in place, by disk and of experts, and survive a lost party.

`tests/acceptance/test_update_under_fire.py` loses every party in every phase.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Qwen3ForCausalLM

from areal_hpc.weights.buckets import BucketPlan, plan_buckets
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.update import UpdateReport
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import scaled
from tests.support.inference_cell import VOCABULARY, Cell, logprob_error, running_cell, tiny_qwen3
from tests.support.reference_models import by_checkpoint_name
from tests.support.senders import sender_ranks
from tests.support.thoroughness import choose
from tests.support.update_faults import Gate, Trap, gates
from tests.support.weight_updates import (
    probe_of,
    publish,
    publishing,
    raise_if_failed,
    save_update,
    specs_of,
)

Weights = dict[str, torch.Tensor]

IN_FLIGHT_S = 0.3
HANG_TIMEOUT_S = scaled(8.0)
"""Limit of each wait in an update in which a party never answers."""
FIRST_IDS = itertools.count(20)
"""First ids of prompts, all new, as an update in place leaves the old cache in use."""
BOTH = [("cell-0", 0), ("cell-0", 1)]
TOKENS = 600
"""Length of a generation that runs during an update."""
PHASES = {"pause_call", "transfer", "load", "verify", "flush", "resume"}
"""Phases of an update whose groups exist."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    run_dir = tmp_path_factory.mktemp("run")
    with running_cell(run_dir, tiny_qwen3(0), replicas_per_cell=2) as cell:
        for index in range(2):
            cell.await_replica(lambda view: view.state == "ready", index)
        yield cell


def trainer(
    cell: Cell, directory: Path | None = None, **weights: Any
) -> AbstractContextManager[Publisher]:
    cell.generation += 1
    return publishing(
        directory or cell.paths.rendezvous_dir,
        cell.service_key,
        weights_dir=cell.paths.published_weights_dir,
        **{"bucket_bytes": 100_000, "update_timeout_s": scaled(20), **weights},
    )


def send(cell: Cell, publisher: Publisher, step: int, model: Qwen3ForCausalLM) -> UpdateReport:
    version = WeightVersion(cell.generation, step)
    return publish(publisher, version, model.state_dict(), probe=probe_of(model))


def update(cell: Cell, publisher: Publisher, step: int, model: Qwen3ForCausalLM) -> UpdateReport:
    """Send an update that succeeds, after which both replicas serve the new weights."""
    report = send(cell, publisher, step, model)
    raise_if_failed(report)
    assert all(spent >= 0 for spent in report.seconds.values())
    for index in range(2):
        assert_serves(cell, index, model, report.version)
    return report


def assert_serves(cell: Cell, index: int, model: Qwen3ForCausalLM, version: WeightVersion) -> None:
    view = cell.replica(index)
    assert (view.state, view.version) == ("serving", str(version))
    prompt = [next(FIRST_IDS), 9, 8, 7, 6]
    reply = cell.generate(prompt, index, max_new_tokens=16, temperature=1.0, ignore_eos=True)
    assert reply["meta_info"]["weight_version"] == str(version)
    assert logprob_error(model, prompt, reply) <= 1e-4


@pytest.mark.thorough  # tests/contract/test_several_senders.py has scripted replicas
def test_two_trainer_ranks_send_each_to_its_own_replica(cell: Cell, tmp_path: Path) -> None:
    models, cell.generation = [tiny_qwen3(seed) for seed in (31, 32)], cell.generation + 1
    files = [tmp_path / f"{at}.safetensors" for at in range(2)]
    for model, path in zip(models, files, strict=True):
        save_update(model, path)
    with sender_ranks(
        cell.paths.rendezvous_dir,
        tmp_path,
        cells=1,
        backend="gloo",
        service_key=cell.service_key,
        generation=cell.generation,
        bucket_bytes=100_000,
        update_timeout_s=scaled(60),
    ) as ranks:
        for step, (model, path) in enumerate(zip(models, files, strict=True)):
            report = ranks.publish(step, path, 2)
            del report["ended_at"]
            assert report == {
                "ok": [["cell-0", 0], ["cell-0", 1]],
                "failed": {},
                "shares": [[["cell-0", 0]], [["cell-0", 1]]],
            }
            for index in range(2):
                assert_serves(cell, index, model, WeightVersion(cell.generation, step))


def incarnations(cell: Cell) -> list[int]:
    return [cell.replica(index).incarnation for index in range(2)]


def begin_generation(cell: Cell, index: int = 0) -> tuple[list[int], Future[dict[str, Any]]]:
    """Begin a generation and return prompt and reply once 50 of its `TOKENS` tokens are there."""
    prompt, has_begun = [next(FIRST_IDS), 20, 30, 40, 50], threading.Event()

    def hear(tokens: int) -> None:
        if tokens >= 50:
            has_begun.set()

    thread = ThreadPoolExecutor(1)
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    reply = thread.submit(cell.generate_live, prompt, index, hear, **sampling)
    thread.shutdown(wait=False)
    assert has_begun.wait(scaled(60))
    return prompt, reply


def begin_generation_at_pause(
    cell: Cell, gate: Gate, index: int = 0
) -> Future[tuple[list[int], Future[dict[str, Any]]]]:
    """Begin a generation once a replica is about to be paused, not a moment before."""
    begun: Future[tuple[list[int], Future[dict[str, Any]]]] = Future()

    def begin(forward: Callable[[], None]) -> None:
        try:
            begun.set_result(begin_generation(cell, index))
        finally:
            forward()

    gate.trap = Trap("pause_generation", 1, index, begin)
    return begun


def versions_in(reply: Future[dict[str, Any]]) -> list[str]:
    return [span["version"] for span in reply.result(scaled(60))["meta_info"]["weight_versions"]]


def test_one_group_of_both_replicas_answers_with_the_published_weights_and_stands(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of a group of several replicas are packed."""
    with trainer(cell, replicas_per_group=2) as publisher:
        report = update(cell, publisher, 0, tiny_qwen3(1))
        assert [key.cell_and_index for key in report.ok] == BOTH
        assert publisher.discover_outdated_training_replicas(report.version) == []
        assert publisher.discover_outdated_training_replicas(WeightVersion(9999, 0)) == list(
            report.ok
        )
        # A later update uses the existing groups: no other can be made.
        monkeypatch.delattr("areal_hpc.weights.broadcast.UpdateProcessGroup")
        assert set(update(cell, publisher, 1, tiny_qwen3(2)).seconds) == {"group_join", *PHASES}


def test_a_generation_in_flight_goes_on_under_the_new_weights_and_its_pause_is_measured(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, directory = tiny_qwen3(2), tiny_qwen3(3), tmp_path / "gates"
    with gates([cell], directory) as (gate,), trainer(cell, directory) as publisher:
        before = update(cell, publisher, 0, old).version
        begun = begin_generation_at_pause(cell, gate)
        monkeypatch.delattr("areal_hpc.weights.broadcast.UpdateProcessGroup")
        report = update(cell, publisher, 1, new)
        assert [key.cell_and_index for key in report.ok] == BOTH
        after = report.version
        prompt, coming = begun.result(0)
        reply = coming.result(scaled(60))
        first, second = reply["meta_info"]["weight_versions"]
        switch = first["end"]
        assert first == {"version": str(before), "start": 0, "end": switch}
        assert second == {"version": str(after), "start": switch, "end": TOKENS}
        assert 0 < switch < TOKENS
        for model, span in ((old, slice(0, switch)), (new, slice(switch, None))):
            assert logprob_error(model, prompt, reply, span) <= 1e-4
        pause = cell.replica().pause
        assert pause is not None
        assert pause.version == str(after)
        assert 0 < pause.busy_s <= pause.pause_s
        publisher.discover_outdated_training_replicas(after)
        assert pause in publisher.pauses


def test_an_update_in_place_goes_on_from_the_old_cache(cell: Cell, tmp_path: Path) -> None:
    directory = tmp_path / "gates"
    with (
        gates([cell], directory) as (gate,),
        trainer(cell, directory, pause_mode="in_place") as publisher,
    ):
        old = update(cell, publisher, 0, tiny_qwen3(3)).version
        begun = begin_generation_at_pause(cell, gate, 1)
        new = update(cell, publisher, 1, tiny_qwen3(4)).version
        _, reply = begun.result(0)
        assert versions_in(reply) == [str(old), str(new)]
        assert reply.result()["meta_info"]["num_retractions"] == 0


def test_weights_by_disk_are_the_ones_that_answer(cell: Cell, tmp_path: Path) -> None:
    directory = tmp_path / "gates"
    with (
        gates([cell], directory) as (gate,),
        trainer(cell, directory, transport="disk") as publisher,
    ):
        update(cell, publisher, 0, tiny_qwen3(6))
        begun = begin_generation_at_pause(cell, gate)
        report = update(cell, publisher, 1, tiny_qwen3(7))
        _, reply = begun.result(0)
        assert versions_in(reply)[-1] == str(report.version)
        assert set(report.seconds) == PHASES - {"transfer"} | {"write"}
        (folder,) = cell.paths.published_weights_dir.iterdir()
        assert folder.name.startswith(f"{report.version}.")


def zero_a_bucket(weights: Weights, older: Weights, bucket: BucketPlan) -> None:
    for spec in bucket.specs:
        weights[spec.name] = torch.zeros_like(weights[spec.name])


def swap_two_tensors(weights: Weights, older: Weights, bucket: BucketPlan) -> None:
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2))
    weights[first], weights[second] = weights[second], weights[first]


def keep_a_bucket_of_the_version_before(
    weights: Weights, older: Weights, bucket: BucketPlan
) -> None:
    weights |= {spec.name: older[spec.name] for spec in bucket.specs}


DAMAGES = (zero_a_bucket, swap_two_tensors, keep_a_bucket_of_the_version_before)


@pytest.mark.parametrize(
    ("damage", "mode"),
    choose(
        itertools.product(DAMAGES, ("retract", "in_place")),
        (zero_a_bucket, "retract"),
        (keep_a_bucket_of_the_version_before, "in_place"),
    ),
)
def test_wrong_weights_are_noticed_never_serve_and_are_sent_again(
    cell: Cell, damage: Callable[[Weights, Weights, BucketPlan], None], mode: str
) -> None:
    older, model = tiny_qwen3(8), tiny_qwen3(8)
    with torch.no_grad():  # a large step of an optimizer
        for parameter in model.parameters():
            parameter += 1e-3 * torch.sign(torch.randn_like(parameter))
    with trainer(cell, pause_mode=mode) as publisher:
        update(cell, publisher, 0, older)
        weights = dict(model.state_dict())
        buckets = plan_buckets(specs_of(weights), 100_000)
        damage(weights, dict(older.state_dict()), buckets[len(buckets) // 2])
        version, before = WeightVersion(cell.generation, 1), incarnations(cell)
        report = publish(publisher, version, weights, probe=probe_of(model))
        assert {key.cell_and_index for key in report.failed} == {*BOTH}
        for index, error in enumerate(report.failed.values()):
            assert "differ from the trainer's by" in str(error)
            view = cell.replica(index)
            assert (view.state, view.version) == ("ready", ""), "nobody vouches for these weights"
        update(cell, publisher, 1, model)
        assert incarnations(cell) == before, "no restart was needed"


@pytest.mark.thorough
def test_a_replica_whose_cache_is_full_of_paused_generations_proves_its_weights(
    tmp_path: Path,
) -> None:
    """An update in place would leave the paused generation in the only slot."""
    model = tiny_qwen3(9)
    with running_cell(tmp_path / "run", model, max_running_requests=1) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        directory = tmp_path / "gates"
        with (
            gates([cell], directory) as (gate,),
            trainer(cell, directory, pause_mode="in_place") as publisher,
        ):
            raise_if_failed(send(cell, publisher, 0, model))
            begun = begin_generation_at_pause(cell, gate)
            raise_if_failed(send(cell, publisher, 1, tiny_qwen3(10)))
            _, reply = begun.result(0)
            assert len(versions_in(reply)) == 2
            assert len(reply.result()["output_ids"]) == TOKENS


SWAPPED = [f"mixture.layers.1.mlp.experts.{at}.down_proj.weight" for at in (5, 6)]


@pytest.fixture(scope="module")
def mixture() -> transformers.Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def mixture_cell(
    tmp_path_factory: pytest.TempPathFactory, mixture: transformers.Qwen3MoeForCausalLM
) -> Iterator[Cell]:
    with running_cell(tmp_path_factory.mktemp("run"), mixture) as mixture_cell:
        mixture_cell.await_replica(lambda view: view.state == "ready")
        yield mixture_cell


@pytest.mark.thorough
def test_experts_reach_a_replica_and_two_that_are_swapped_are_found(
    mixture_cell: Cell, mixture: transformers.Qwen3MoeForCausalLM
) -> None:
    weights = by_checkpoint_name(dict(mixture.state_dict()))
    with publishing(
        mixture_cell.paths.rendezvous_dir,
        mixture_cell.service_key,
        bucket_bytes=50_000,
        update_timeout_s=scaled(20),
    ) as publisher:
        swapped = weights | {SWAPPED[0]: weights[SWAPPED[1]], SWAPPED[1]: weights[SWAPPED[0]]}
        report = publish(publisher, WeightVersion(1, 0), swapped, probe=probe_of(mixture))
        assert "differ from the trainer's by" in str(*report.failed.values())
        assert mixture_cell.replica().version == ""
        raise_if_failed(publish(publisher, WeightVersion(1, 1), weights, probe=probe_of(mixture)))
        assert mixture_cell.replica().version == "1.1"
