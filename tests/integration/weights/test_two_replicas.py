"""Updates of two replicas at once: in one group, in place, and with a party lost on the way.

`tests/acceptance/test_update_under_fire.py` loses every party in every phase.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.report import UpdateReport
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.inference_cell import Cell, running_cell, tiny_qwen3
from tests.support.update_faults import Reader, Sender, Trap, gates
from tests.support.weight_updates import raise_if_failed

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
IN_FLIGHT_S = 0.3
HANG_TIMEOUT_S = 8.0
"""Of each wait in an update in which somebody is waited for in vain."""
FIRST_IDS = itertools.count(20)
"""A prompt that begins like none before it: an update in place leaves the old cache in use."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    run_dir = tmp_path_factory.mktemp("run")
    with running_cell(run_dir, tiny_qwen3(0), replicas_per_cell=2) as cell:
        for index in range(2):
            cell.await_replica(lambda view: view.state == "ready", index, timeout_s=200)
        yield cell


@contextmanager
def publishing(
    cell: Cell, directory: Path | None = None, *, update_timeout_s: float = 20, **weights: Any
) -> Iterator[Publisher]:
    """The next start of a trainer, which finds relays in `directory`."""
    cell.generation += 1
    config = WeightsConfig(bucket_bytes=100_000, update_timeout_s=update_timeout_s, **weights)
    directory = directory or cell.layout.rendezvous_dir
    publisher = Publisher(
        config, directory, 1, cell.admin_key, "gloo", CPU, cell.layout.weights_dir
    )
    try:
        yield publisher
    finally:
        publisher.close()


def publish(publisher: Publisher, version: WeightVersion, model: Qwen3ForCausalLM) -> UpdateReport:
    weights = model.state_dict()
    specs = [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in weights.items()
    ]
    replicas = publisher.outdated(version)
    give_up_at = time.monotonic() + 10
    while not replicas:  # a relay that is slow once is asked again
        assert time.monotonic() < give_up_at
        replicas = publisher.outdated(version)
    return publisher.publish(version, specs, iter(weights.items()), replicas)


def logprobs_of(model: Qwen3ForCausalLM, prompt: list[int], output: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


def assert_serves(cell: Cell, index: int, model: Qwen3ForCausalLM, version: WeightVersion) -> None:
    view = cell.replica(index)
    assert (view.state, view.version) == ("serving", str(version))
    prompt = [next(FIRST_IDS), 9, 8, 7, 6]
    reply = cell.generate(prompt, index, max_new_tokens=16, temperature=1.0, ignore_eos=True)
    assert reply["meta_info"]["weight_version"] == str(version)
    sampled = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (sampled - logprobs_of(model, prompt, reply["output_ids"])).abs().max() <= 1e-4


@pytest.mark.parametrize("replicas_per_group", [1, 2])
def test_two_replicas_are_updated_at_once(cell: Cell, replicas_per_group: int) -> None:
    """Each in a group of its own, and both in one, where buckets are packed."""
    with publishing(cell, replicas_per_group=replicas_per_group) as publisher:
        for step in range(2):  # the second update uses the groups that stand
            version, model = WeightVersion(cell.generation, step), tiny_qwen3(step + 1)
            report = publish(publisher, version, model)
            raise_if_failed(report)
            assert [key.place for key in report.ok] == [("cell-0", 0), ("cell-0", 1)]
            for index in range(2):
                assert_serves(cell, index, model, version)


def test_an_update_in_place_goes_on_from_the_old_cache(cell: Cell) -> None:
    with publishing(cell, pause_mode="in_place") as publisher:
        old, new = WeightVersion(cell.generation, 0), WeightVersion(cell.generation, 1)
        raise_if_failed(publish(publisher, old, tiny_qwen3(3)))
        replies: list[dict[str, Any]] = []
        prompt = [next(FIRST_IDS), 7, 8, 9]
        sampling = {"max_new_tokens": 900, "temperature": 1.0, "ignore_eos": True}
        speaking = threading.Event()
        writer = threading.Thread(
            target=lambda: replies.append(
                cell.generate_live(prompt, lambda tokens: speaking.set(), 1, **sampling)
            )
        )
        writer.start()
        assert speaking.wait(60)
        raise_if_failed(publish(publisher, new, tiny_qwen3(4)))
        writer.join()
        meta = replies[0]["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == [str(old), str(new)]
        assert meta["num_retractions"] == 0
        for index in range(2):
            assert_serves(cell, index, tiny_qwen3(4), new)


def test_a_member_killed_in_a_broadcast_takes_only_its_group_and_only_once(
    cell: Cell, tmp_path: Path
) -> None:
    before = [cell.replica(index) for index in range(2)]

    def kill_while_it_receives(forward: Callable[[], None]) -> None:
        scheduler = cell.scheduler(1)
        scheduler.suspend()
        killer = threading.Timer(IN_FLIGHT_S, scheduler.kill)
        killer.start()
        forward()
        killer.join()

    with (
        gates([cell], tmp_path / "gates") as (gate,),
        publishing(cell, tmp_path / "gates", replicas_per_group=2) as publisher,
    ):
        raise_if_failed(publish(publisher, WeightVersion(cell.generation, 0), tiny_qwen3(5)))
        gate.trap = Trap("update_weights_from_distributed", 2, 1, kill_while_it_receives)
        version, model = WeightVersion(cell.generation, 1), tiny_qwen3(6)
        report = publish(publisher, version, model)
        assert gate.trap.seen == 2
        gate.trap = None
        assert {key.place for key in report.failed} == {("cell-0", 0), ("cell-0", 1)}
        assert cell.replica(0).state == "ready", "its group failed, and it was fenced"
        report = publish(publisher, version, model)
        assert ("cell-0", 0) in {key.place for key in report.ok}, "alone it is well"
        cell.await_replica(lambda view: view.state == "ready", 1)
        raise_if_failed(publish(publisher, version, model))
        for index in range(2):
            assert_serves(cell, index, model, version)
    assert cell.replica(0).incarnation == before[0].incarnation
    assert cell.replica(1).incarnation > before[1].incarnation


def test_a_member_whose_node_vanishes_costs_the_others_a_wait_and_no_restart(
    cell: Cell, tmp_path: Path
) -> None:
    before = [cell.replica(index) for index in range(2)]
    with (
        gates([cell], tmp_path / "gates") as (gate,),
        publishing(cell, tmp_path / "gates", update_timeout_s=HANG_TIMEOUT_S) as publisher,
    ):
        raise_if_failed(publish(publisher, WeightVersion(cell.generation, 0), tiny_qwen3(7)))
        gate.trap = Trap("update_weights_from_distributed", 2, 1, lambda forward: gate.lost.add(1))
        version, model = WeightVersion(cell.generation, 1), tiny_qwen3(8)
        assert [key.place for key in publish(publisher, version, model).ok] == [("cell-0", 0)]
        assert_serves(cell, 0, model, version)
        gate.lost.clear()
        raise_if_failed(publish(publisher, version, model))
        assert_serves(cell, 1, model, version)
    assert [cell.replica(index).incarnation for index in range(2)] == [
        past.incarnation for past in before
    ]


def test_half_loaded_weights_of_a_dead_sender_never_answer_and_are_sent_again(
    cell: Cell, tmp_path: Path
) -> None:
    old, new = tiny_qwen3(7), tiny_qwen3(8)
    with publishing(cell) as publisher:
        raise_if_failed(publish(publisher, WeightVersion(cell.generation, 0), old))
    before = [cell.replica(index) for index in range(2)]
    models = {f"{cell.generation}.0": old} | {f"{cell.generation + one}.1": new for one in (1, 2)}
    readers = [Reader(cell, index, models) for index in range(2)]
    save_file(new.state_dict(), tmp_path / "new.safetensors")
    directory = tmp_path / "gates"
    with gates([cell], directory) as (gate,):
        senders = [
            Sender(directory, 1, cell.admin_key, cell.generation + one, update_timeout_s=30)
            for one in (1, 2)
        ]
        for sender in senders:
            sender.await_ready()
        for reader in readers:
            reader.start()
        gate.trap = Trap(
            "update_weights_from_distributed", 2, 1, lambda forward: senders[0].process.kill()
        )
        assert senders[0].publish(1, tmp_path / "new.safetensors", 2) is None, "it was killed"
        assert [cell.replica(index).version for index in range(2)] == ["", ""]
        gate.trap = None
        report = senders[1].publish(1, tmp_path / "new.safetensors", 2)
        assert report is not None
        assert len(report["ok"]) == 2
        time.sleep(0.5)
        for reader in readers:
            reader.stop()
        for sender in senders:
            sender.stop()
    assert [reader.wrong for reader in readers] == [[], []]
    for reader, past in zip(readers, before, strict=True):
        assert reader.answered[-1][1] == f"{cell.generation + 2}.1"
        assert cell.replica(reader.index).incarnation == past.incarnation, "no restart was needed"
    cell.generation += 2
