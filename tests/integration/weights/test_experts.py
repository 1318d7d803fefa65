"""Experts of a mixture reach a real replica, and a byte of one that changed on the way is found."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
import transformers

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import PackingBuffers
from areal_hpc.weights.buckets.plan import plan_buckets
from areal_hpc.weights.digester import BucketDigester, DigestsByTpSizeAndRank
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.transports.broadcast import BroadcastSession
from areal_hpc.weights.transports.process_group import UpdateProcessGroup
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import scaled
from tests.support.inference_cell import VOCABULARY, Cell, running_cell
from tests.support.reference_models import by_checkpoint_name
from tests.support.weight_updates import publish, publishing, raise_if_failed, specs_of

DAMAGED = "model.layers.1.mlp.experts.5.down_proj.weight"


@pytest.fixture(scope="module")
def model() -> transformers.Qwen3MoeForCausalLM:
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
def cell(
    tmp_path_factory: pytest.TempPathFactory, model: transformers.Qwen3MoeForCausalLM
) -> Iterator[Cell]:
    with running_cell(tmp_path_factory.mktemp("run"), model) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        yield cell


@pytest.mark.thorough
def test_experts_are_compared_and_a_byte_that_changes_on_the_way_is_found(
    cell: Cell, model: transformers.Qwen3MoeForCausalLM
) -> None:
    weights = by_checkpoint_name(dict(model.state_dict()))
    version = WeightVersion(1, 0)
    with publishing(
        cell.paths.rendezvous_dir,
        cell.service_key,
        bucket_bytes=50_000,
        update_timeout_s=scaled(20),
    ) as publisher:
        (key,) = publisher.discover_outdated_training_replicas(version)
        buckets = plan_buckets(specs_of(weights), 1 << 30)
        packed = PackingBuffers(torch.device("cpu")).open_bucket_in_older_buffer(buckets[0])
        for name, tensor in weights.items():
            packed.copy_or_hold_parameter(name, tensor)
        digester = BucketDigester(buckets, {1}, "cpu")
        digester.add(packed)
        sent: Future[DigestsByTpSizeAndRank] = Future()
        sent.set_result(digester.finish())
        packed.tensors[DAMAGED].view(torch.uint8)[0, 0] ^= 1
        session = BroadcastSession(
            UpdateProcessGroup("damaged", "127.0.0.1", 2, "gloo", 20),
            [ReplicaClient(key, cell.service_key, 1, 20)],
            WeightsConfig(),
        )
        session.fence_and_form_group()
        session.fence_and_pause_replicas()
        session.send_bucket(packed, version)
        session.end_update()
        with pytest.raises(
            WeightSyncError, match=r"1 different \['model\.layers\.1\.mlp\.experts\.w2_weight'\]"
        ):
            session.verify(version, sent)
        session.abandon_and_fence()
        raise_if_failed(publish(publisher, WeightVersion(1, 1), weights))
        assert cell.replica().version == "1.1"
