"""Self-test of serving: a cell's replica beside the trainer, before and after an update of weights.

The replica generates; the trainer scores the same tokens, takes a step and sends its new weights as
in a run; the replica proves their checksum and generates again.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from areal_hpc.errors import ClusterError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_service_key
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import ADVANTAGE_CHANNEL
from areal_hpc.trainer.model.hf_weights import list_hf_specs, stream_hf_tensors
from areal_hpc.trainer.model.policy import Policy
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.trainer.self_test.messages import EngineComparison, EngineComparisonRequest
from areal_hpc.trainer.self_test.small_policy import (
    init_single_rank_groups,
    list_scored_logprobs,
    load_policy,
    make_training_row,
    take_step_with_fresh_adamw,
)
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.discovery import ReplicaDiscovery
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.transports.transport import UpdateReport
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

LEARNING_RATE = 3e-4
"""Large: the step must change log-probabilities by more than rounding does."""
PROMPT_COUNT = 4
PROMPT_TOKENS = 24
REPLY_TOKENS = 24
CALL_TIMEOUT_S = 300.0
"""The first call compiles kernels."""
POLL_S = 0.5


class _Meta(Struct):
    output_token_logprobs: list[list[float | int | str | None]]


class _Reply(Struct):
    output_ids: list[int]
    meta_info: _Meta


class SampledReply(Struct, frozen=True):
    """A prompt with a reply, and the engine's log-probabilities of it."""

    row: TrainingRow
    """The reply is scored; a step will make it likelier or rarer."""
    logprobs: list[float]


def await_replica(engine_request: EngineComparisonRequest, service_key: str) -> ReplicaView:
    """The cell's first replica, once it is up.

    Raises:
        ClusterError: That took too long.
    """
    discovery = ReplicaDiscovery(
        RunPaths(Path(engine_request.run_dir)).rendezvous_dir, 1, service_key
    )
    give_up_at = time.monotonic() + engine_request.start_timeout_s
    try:
        while time.monotonic() < give_up_at:
            for _, view in discovery.discover():
                if view.state in ("ready", "serving"):
                    return view
            time.sleep(POLL_S)
    finally:
        discovery.close()
    raise ClusterError(f"no replica was ready within {engine_request.start_timeout_s:.0f} s")


def sample_replies(server: ReplicaView, vocab: int, reply_tokens: int) -> list[SampledReply]:
    """Replies to a few prompts at temperature 1, one by one."""
    samples = []
    for number in range(PROMPT_COUNT):
        prompt = [3 + (37 * number + 11 * at) % (vocab - 3) for at in range(PROMPT_TOKENS)]
        answer = httpx.post(
            f"{server.url}/generate",
            json={
                "input_ids": prompt,
                "sampling_params": {
                    "max_new_tokens": reply_tokens, "temperature": 1.0, "ignore_eos": True
                },
                "return_logprob": True,
            },
            headers={"authorization": f"Bearer {server.keys.api}"},
            timeout=CALL_TIMEOUT_S,
            trust_env=False,
        )  # fmt: skip
        if answer.is_error:
            raise ClusterError(f"SGLang answered {answer.status_code}: {answer.text[:300]}")
        reply = msgspec.json.decode(answer.content, type=_Reply)
        advantage = 1.0 if number % 2 else -1.0
        row = make_training_row(
            [*prompt, *reply.output_ids], len(prompt), {ADVANTAGE_CHANNEL: advantage}
        )
        entries = reply.meta_info.output_token_logprobs
        samples.append(SampledReply(row, [float(entry[0] or 0.0) for entry in entries]))
    return samples


def compare_logprobs(policy: Policy, samples: Sequence[SampledReply]) -> list[float]:
    """Absolute differences of every sampled token's log-probability."""
    return [
        abs(ours - theirs)
        for sample in samples
        for ours, theirs in zip(
            list_scored_logprobs(policy, sample.row), sample.logprobs, strict=True
        )
    ]


def publish_to_replica(
    engine_request: EngineComparisonRequest, policy: Policy, service_key: str
) -> UpdateReport:
    """Send the policy's weights to the replica, which proves their checksum."""
    paths, version = RunPaths(Path(engine_request.run_dir)), WeightVersion(1, 1)
    publisher = Publisher(
        WeightsConfig(transport=engine_request.transport),
        paths.rendezvous_dir,
        1,
        service_key,
        "nccl" if policy.device.type == "cuda" else "gloo",
        policy.device,
        paths.published_weights_dir,
    )
    specs = [
        TensorSpec(name, shape, str(dtype).removeprefix("torch."))
        for name, shape, dtype in list_hf_specs(policy)
    ]
    try:
        replicas = publisher.discover_outdated_training_replicas(version)
        return publisher.publish_from_this_rank(version, specs, stream_hf_tensors(policy), replicas)
    finally:
        publisher.close()


def compare_engine_around_update(
    policy: Policy, engine_request: EngineComparisonRequest
) -> EngineComparison:
    """All of it, on a replica that serves the policy's weights."""
    service_key = ensure_service_key(RunPaths(Path(engine_request.run_dir)).service_key)
    began = time.monotonic()
    server = await_replica(engine_request, service_key)
    start_s = time.monotonic() - began
    reply_tokens = max(1, min(REPLY_TOKENS, engine_request.context_tokens - PROMPT_TOKENS - 1))
    first = sample_replies(server, policy.arch.vocab, reply_tokens)
    gaps = compare_logprobs(policy, first)
    before = [list_scored_logprobs(policy, sample.row) for sample in first]
    take_step_with_fresh_adamw(policy, [sample.row for sample in first], LEARNING_RATE)
    after = [list_scored_logprobs(policy, sample.row) for sample in first]
    update = publish_to_replica(engine_request, policy, service_key)
    trouble = "; ".join(map(str, update.failed.values()))
    if not update.ok:
        trouble = trouble or "the replica was not found any more"
    updated = gaps
    if not trouble:
        updated = compare_logprobs(policy, sample_replies(server, policy.arch.vocab, reply_tokens))
    return EngineComparison(
        dtype=engine_request.dtype,
        transport=engine_request.transport,
        start_s=start_s,
        tokens=len(gaps),
        mean_gap=statistics.mean(gaps),
        max_gap=max(gaps),
        updated_mean_gap=statistics.mean(updated),
        updated_max_gap=max(updated),
        change=statistics.mean(
            abs(one - other)
            for ones, others in zip(before, after, strict=True)
            for one, other in zip(ones, others, strict=True)
        ),
        sent_bytes=update.parameter_bytes,
        update_s={name: float(value) for name, value in update.seconds.items()},
        update_error=trouble,
    )


def main() -> None:
    """Compare as ordered."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineComparisonRequest)
    device = init_single_rank_groups(order.device)
    policy = load_policy(Path(order.model_dir), order.dtype, device)
    comparison = compare_engine_around_update(policy, order)
    write_atomic(Path(order.report), msgspec.json.encode(comparison))
    destroy_process_groups()


if __name__ == "__main__":
    main()
