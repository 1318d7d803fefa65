import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import PackingBuffers
from areal_hpc.weights.buckets.plan import TensorSpec, plan_buckets
from areal_hpc.weights.checksum import compute_rank_digests
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.report import UpdateReport
from areal_hpc.weights.transports.broadcast import BroadcastSession
from areal_hpc.weights.transports.process_group import UpdateProcessGroup
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.inference_cell import Cell, running_cell, tiny_qwen3
from tests.support.update_faults import Trap, gates
from tests.support.weight_updates import raise_if_failed

pytestmark = pytest.mark.timeout(240)

PROMPT = [10, 20, 30, 40, 50]
STEPS = itertools.count()
"""Tests run in any order on one cell; each update takes the next version."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    with running_cell(tmp_path_factory.mktemp("run"), tiny_qwen3(0)) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        yield cell


@pytest.fixture(scope="module")
def publisher(cell: Cell) -> Iterator[Publisher]:
    config = WeightsConfig(bucket_bytes=100_000, update_timeout_s=20)
    publisher = Publisher(
        config, cell.layout.rendezvous_dir, 1, cell.admin_key, "gloo", CPU, cell.layout.weights_dir
    )
    yield publisher
    publisher.close()


@contextmanager
def publishing(cell: Cell, rendezvous_dir: Path, **weights: Any) -> Iterator[Publisher]:
    """Another way to update the same cell."""
    config = WeightsConfig(bucket_bytes=100_000, update_timeout_s=20, **weights)
    publisher = Publisher(
        config, rendezvous_dir, 1, cell.admin_key, "gloo", CPU, cell.layout.weights_dir
    )
    try:
        yield publisher
    finally:
        publisher.close()


def next_version() -> WeightVersion:
    return WeightVersion(1, next(STEPS))


def specs_of(model: Qwen3ForCausalLM) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in model.state_dict().items()
    ]


def publish(publisher: Publisher, model: Qwen3ForCausalLM) -> UpdateReport:
    version = next_version()
    replicas = publisher.outdated(version)
    assert replicas
    report = publisher.publish(version, specs_of(model), iter(model.state_dict().items()), replicas)
    raise_if_failed(report)
    return report


def logprobs_of(model: Qwen3ForCausalLM, prompt: list[int], output: list[int]) -> torch.Tensor:
    """What transformers gives each output token after the tokens before it."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


def assert_serves(cell: Cell, model: Qwen3ForCausalLM, version: WeightVersion) -> None:
    reply = cell.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
    output = reply["output_ids"]
    with torch.no_grad():
        choices = model(torch.tensor([PROMPT + output])).logits[0].argmax(-1).tolist()
    assert output == choices[len(PROMPT) - 1 : -1]
    sampled = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (sampled - logprobs_of(model, PROMPT, output)).abs().max() <= 1e-4
    assert reply["meta_info"]["weight_version"] == str(version)
    view = cell.replica()
    assert (view.state, view.version) == ("serving", str(version))


def test_published_weights_are_the_ones_that_answer(cell: Cell, publisher: Publisher) -> None:
    model = tiny_qwen3(1)
    report = publish(publisher, model)
    assert_serves(cell, model, report.version)
    assert report.size_bytes == sum(spec.size_bytes for spec in specs_of(model))
    phases = {"group_join", "pause_call", "transfer", "load", "verify", "flush", "resume"}
    assert set(report.seconds) == phases
    assert all(spent >= 0 for spent in report.seconds.values())
    assert publisher.outdated(report.version) == []
    assert publisher.outdated(WeightVersion(2, report.version.step)) == list(report.ok)


def test_later_updates_use_the_group_that_stands(
    cell: Cell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, tiny_qwen3(1))
    model = tiny_qwen3(2)
    # There is no other to be made.
    monkeypatch.delattr("areal_hpc.weights.transports.broadcast.UpdateProcessGroup")
    report = publish(publisher, model)
    assert not report.failed
    assert_serves(cell, model, report.version)


def test_a_generation_in_flight_goes_on_under_the_new_weights(
    cell: Cell, publisher: Publisher
) -> None:
    old, new = tiny_qwen3(2), tiny_qwen3(3)
    before = publish(publisher, old).version
    writer = Writer(cell, 600)
    after = publish(publisher, new).version
    first, second = writer.spans()
    meta, output = writer.reply["meta_info"], writer.reply["output_ids"]
    switch = first["end"]
    assert first == {"version": str(before), "start": 0, "end": switch}
    assert second == {"version": str(after), "start": switch, "end": 600}
    assert 0 < switch < 600
    sampled = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    expected_old = logprobs_of(old, PROMPT, output)[:switch]
    expected_new = logprobs_of(new, PROMPT, output)[switch:]
    assert (sampled[:switch] - expected_old).abs().max() <= 1e-4
    assert (sampled[switch:] - expected_new).abs().max() <= 1e-4


class Writer(threading.Thread):
    """A generation that is well under way."""

    WELL_UNDER_WAY = 50
    """Tokens."""

    def __init__(self, cell: Cell, tokens: int) -> None:
        super().__init__()
        self._cell, self._tokens = cell, tokens
        self._began = threading.Event()
        self.reply: dict[str, Any] = {}
        self.start()
        assert self._began.wait(30)

    def run(self) -> None:
        self.reply = self._cell.generate_live(
            PROMPT, self._hear, max_new_tokens=self._tokens, temperature=1.0, ignore_eos=True
        )

    def _hear(self, tokens: int) -> None:
        if tokens >= self.WELL_UNDER_WAY:
            self._began.set()

    def spans(self) -> list[dict[str, Any]]:
        """Versions of its tokens, once it has ended."""
        self.join(60)
        spans: list[dict[str, Any]] = self.reply["meta_info"]["weight_versions"]
        return spans


def test_the_cell_measures_from_the_pause_to_the_first_new_token(
    cell: Cell, publisher: Publisher
) -> None:
    publish(publisher, tiny_qwen3(2))
    writer = Writer(cell, 600)
    report = publish(publisher, tiny_qwen3(3))
    view = cell.await_replica(
        lambda view: view.stall is not None and view.stall.version == str(report.version)
    )
    assert view.stall is not None
    old = writer.spans()[0]
    assert view.stall.requests == 1
    known_tokens = len(PROMPT) + old["end"]  # SGLang says how many after every 15th
    assert known_tokens - 20 <= view.stall.recomputed_tokens <= known_tokens
    stopped_s = sum(took for name, took in report.seconds.items() if name != "group_join")
    assert 0 <= view.stall.reprefill_s < view.stall.stall_s < stopped_s + 5
    publisher.outdated(report.version)
    assert view.stall in publisher.stalls


def test_weights_by_disk_are_the_ones_that_answer(cell: Cell) -> None:
    with publishing(cell, cell.layout.rendezvous_dir, transport="disk") as publisher:
        publish(publisher, tiny_qwen3(6))
        writer, model = Writer(cell, 600), tiny_qwen3(7)
        report = publish(publisher, model)
        assert_serves(cell, model, report.version)
        assert [span["version"] for span in writer.spans()][-1] == str(report.version)
        assert {"write", "pause_call", "load", "verify", "flush", "resume"} == set(report.seconds)
        (folder,) = cell.layout.weights_dir.iterdir()
        assert folder.name.startswith(f"{report.version}.")


def test_a_byte_that_changes_on_the_disk_is_found(cell: Cell, tmp_path: Path) -> None:
    def damage(forward: Callable[[], None]) -> None:
        folders = cell.layout.weights_dir.iterdir()  # an earlier sender's may still be there
        folder = max(folders, key=lambda folder: folder.stat().st_mtime_ns)
        path = sorted(folder.iterdir())[-1]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        forward()

    directory, model = tmp_path / "gates", tiny_qwen3(8)
    with (
        gates([cell], directory) as (gate,),
        publishing(cell, directory, transport="disk") as publisher,
    ):
        gate.trap = Trap("load", 1, 0, damage)
        version = next_version()
        specs, weights = specs_of(model), iter(model.state_dict().items())
        report = publisher.publish(version, specs, weights, publisher.outdated(version))
        assert report.ok == ()
        (error,) = report.failed.values()
        assert "1 different" in str(error)
        assert cell.replica().state == "ready", "nobody vouches for these weights"
        gate.trap = None
        assert_serves(cell, model, publish(publisher, model).version)


def test_a_byte_that_changes_on_the_way_is_found(cell: Cell, publisher: Publisher) -> None:
    version, model = next_version(), tiny_qwen3(4)
    (key,) = publisher.outdated(version)
    (bucket,) = plan_buckets(specs_of(model), 1 << 30)
    packed = PackingBuffers(CPU).open(bucket)
    for name, tensor in model.state_dict().items():
        packed.place(name, tensor)
    expected = {(1, 0): compute_rank_digests(packed.tensors, 0, 1, "cpu")}
    target = "model.layers.1.self_attn.k_proj.weight"
    slot = next(slot for slot in bucket.slots if slot.spec.name == target)
    packed.messages[0][slot.offset] ^= 1
    control = ReplicaClient(key, cell.admin_key, 1, 20)
    swap = BroadcastSession(
        UpdateProcessGroup(f"{version}", "127.0.0.1", 2, "gloo", 20), [control], WeightsConfig()
    )
    swap.join()
    swap.pause()
    swap.send(packed, version)
    swap.end()
    with pytest.raises(WeightSyncError, match=r"1 different \['model\.layers\.1\..*qkv_proj"):
        swap.verify(version, expected)
    swap.give_up()
    assert cell.replica().state == "ready", "nobody vouches for these weights"
    assert_serves(cell, model, publish(publisher, model).version)


def test_a_server_killed_during_an_update_is_replaced_and_gets_a_full_resend(
    cell: Cell, publisher: Publisher
) -> None:
    model, version = tiny_qwen3(5), next_version()
    before = cell.replica()
    sent: list[str] = []

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for at, (name, tensor) in enumerate(model.state_dict().items()):
            if at == 12:
                cell.engine_processes()[0].kill()
            sent.append(name)
            yield name, tensor

    replicas = publisher.outdated(version)
    report = publisher.publish(version, specs_of(model), parameters(), replicas)
    assert sent == [*model.state_dict()], "exporting is a collective: always drained"
    assert report.ok == ()
    with pytest.raises(WeightSyncError, match="replica 0 of cell-0"):
        raise_if_failed(report)
    cell.await_replica(lambda view: view.incarnation == before.incarnation + 1)
    cell.await_replica(lambda view: view.state == "ready")
    assert_serves(cell, model, publish(publisher, model).version)
