"""Comparison of the trainer on one device with plain PyTorch and transformers there.

`python -m tests.gpu.device_worker DEVICE REPORT.json`. On a GPU everything runs in bfloat16 at the
sizes of Qwen2.5-0.5B; on a CPU the same lines run with small sizes. `bounds` says what must hold.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.model.attention import plan_varlen_attention
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.experts import GroupedExperts
from areal_hpc.trainer.model.hf_weights import list_hf_specs, stream_hf_tensors
from areal_hpc.trainer.model.logprobs import consume_logits_into_token_logprobs
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.optimizer import offload_optimizer, step_optimizer
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.trainer.step import MicroBatch, run_forward_backward
from areal_hpc.weights.buckets import PackingBuffers, TensorSpec, plan_buckets
from benchmarks._learning import (
    QWEN_HALF_BILLION,
    Sizes,
    Trainee,
    make_hf_model,
    make_row,
    open_lone_world,
)
from tests.support.plain_torch import attend_over_ranks, attend_plainly

SMALL = Sizes("qwen2", hidden=256, layers=3, heads=4, kv_heads=2, ffn=512, vocab=1000)
EXPECTED = "expected"
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64


def attention_gaps(device: torch.device, dtype: torch.dtype, cp: int) -> dict[str, float]:
    """Compare the segments of all `cp` ranks with softmax written out in float32."""
    lengths = np.array([7, 1, 40, 25]) * 2 * cp
    tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(cp)
    parts = [
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(device, dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    scale = HEAD_DIM**-0.5
    expected = attend_plainly([part.float() for part in parts], lengths, scale)
    actual = attend_over_ranks(plan_varlen_attention, parts, lengths, scale, cp)
    weights = torch.randn(expected.shape, generator=generator).to(device)
    got = torch.autograd.grad((actual.float() * weights).sum(), parts)
    want = torch.autograd.grad((expected * weights).sum(), parts)
    return {
        "value": (actual.float() - expected).abs().max().item(),
        "gradient": max(relative_gap(a, b) for a, b in zip(got, want, strict=True)),
    }


def relative_gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float(((actual.float() - expected).norm() / expected.norm()).item())


def expert_gaps(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Compare experts in grouped products with each alone in float32, some without a token."""
    sizes = SimpleNamespace(
        moe_ffn_hidden_size=96, hidden_size=64, params_dtype=dtype,
        use_cpu_initialization=device.type == "cpu",
    )  # fmt: skip
    counts, gaps = [0, 37, 5, 0, 118, 1, 0], []
    for _ in range(2):  # in memory that held something else, the second time
        generator = torch.Generator().manual_seed(4)
        draw = partial(torch.randn, generator=generator)
        experts = GroupedExperts(len(counts), sizes, SimpleNamespace(ep=None, expt_dp=None))
        for parameter in experts.parameters():
            parameter.data.copy_(draw(parameter.shape) / 8)
        rows = draw(sum(counts), 64).to(device, dtype).requires_grad_()
        weights = torch.rand(sum(counts), generator=generator).to(device).requires_grad_()
        inputs = [rows, weights, *experts.parameters()]
        actual, _ = experts(rows, torch.tensor(counts, device=device), weights)
        direction = draw(actual.shape).to(device)
        got = torch.autograd.grad((actual.float() * direction).sum(), inputs)
        exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
        expected = loop_over_experts(exact, counts)
        want = torch.autograd.grad((expected * direction).sum(), exact)
        empty = [expert for expert, count in enumerate(counts) if not count]
        gaps.append(
            {
                "value": relative_gap(actual, expected),
                "gradient": max(relative_gap(a, b) for a, b in zip(got, want, strict=True)),
                "gradient_without_tokens": max(float(grad[empty].abs().max()) for grad in got[2:]),
            }
        )
        del actual, got, want, expected, exact
        for tensor in inputs:  # for PyTorch to hand out again
            [torch.full_like(tensor, torch.nan) for _ in range(4)]
    return {name: max(row[name] for row in gaps) for name in gaps[0]}


def loop_over_experts(inputs: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Compute the experts of rows, given their weights and both stacks of projections."""
    rows, weights, first, second = inputs
    outputs = []
    parts = zip(rows.split(counts), weights.split(counts), first, second, strict=True)
    for part, scale, gate_up, down in parts:
        gate, up = (part @ gate_up.t()).chunk(2, -1)
        outputs.append((torch.nn.functional.silu(gate) * up * scale[:, None]) @ down.t())
    return torch.cat(outputs)


def logprob_gaps(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> dict[str, Any]:
    """Compare the kernel on one matrix of logits with a log-softmax of a few of its rows."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 32, generator=generator).to(device, dtype)
    matrix = torch.randn(vocab, 32, generator=generator).to(device, dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    temperature = torch.full((rows,), 0.7, device=device)
    logits = (hidden @ matrix.t()).requires_grad_()
    few = torch.arange(0, rows, max(1, rows // 8), device=device)
    kept = logits.detach()[few].float() / 0.7
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    # An intermediate, as in the model: its storage becomes that of the gradient.
    assert dist.group.WORLD is not None
    values = consume_logits_into_token_logprobs(
        logits.view_as(logits), labels, temperature, vocab, dist.group.WORLD
    )
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    expected = kept.log_softmax(-1)
    onehot = torch.nn.functional.one_hot(labels[few], vocab)
    return {
        "value": (values[few] - expected.gather(1, labels[few, None])[:, 0]).abs().max().item(),
        "gradient": relative_gap(gradient[few], (onehot - expected.exp()) / 0.7),
        "extra_bytes": peak - before,
        "float32_copy_bytes": 4 * rows * vocab,
    }


def weighted_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    gap = (logprobs_N.detach() - batch.channels_N[EXPECTED]).abs().max().item()
    total = -(logprobs_N * batch.channels_N[Channel.ADVANTAGE]).sum()
    return total, LossStats({"tokens": len(logprobs_N)}, {"gap": gap})


def hf_logprobs(model: Any, row: TrainingRow) -> torch.Tensor:
    """Compute log-probabilities of every token but the first, in float32."""
    ids = torch.from_numpy(row.input_ids_T).long().to(model.device)
    logits: torch.Tensor = model(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def hf_gradients(model: Any, rows: list[TrainingRow]) -> dict[str, torch.Tensor]:
    """Compute gradients of the token mean of -advantage x log-probability."""
    tokens = sum(len(row.input_ids_T) - 1 for row in rows)
    for row in rows:
        advantages = torch.from_numpy(row.channels[Channel.ADVANTAGE][1:]).to(model.device)
        (-(hf_logprobs(model, row) * advantages).sum() / tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trainee_gradients(trainee: Trainee) -> dict[str, torch.Tensor]:
    """The accumulated gradients, carried out by the same way as weights."""
    parameters = list(trainee.policy.gpt.parameters())
    held = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad.to(parameter.dtype)
    gradients = {name: tensor.clone() for name, tensor in stream_hf_tensors(trainee.policy)}
    for parameter, data in zip(parameters, held, strict=True):
        parameter.data = data
    return gradients


def flattened(gradients: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    return torch.cat([gradients[name].float().flatten() for name in names])


def parity(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Compare the trainer with transformers in float32, and transformers in `dtype` with that."""
    exact, same = make_hf_model(SMALL, device, torch.float32), make_hf_model(SMALL, device, dtype)
    generator = np.random.default_rng(5)
    rows, their_gap = [], 0.0
    for length in generator.integers(5, 200 if device.type == "cuda" else 60, size=12):
        row = make_row(generator, int(length), SMALL.vocab, 1.0)
        expected_T = np.zeros(length, dtype=np.float32)
        with torch.no_grad():
            logprobs = hf_logprobs(exact, row)
            their_gap = max(their_gap, (hf_logprobs(same, row) - logprobs).abs().max().item())
        expected_T[1:] = logprobs.cpu().numpy()
        rows.append(dataclasses.replace(row, channels={**row.channels, EXPECTED: expected_T}))
    trainee = Trainee(same, device, dtype, max_tokens=512 if device.type == "cuda" else 160)
    batches = trainee.pack(rows, (Channel.ADVANTAGE, EXPECTED))
    stats = run_forward_backward(trainee.policy, batches, weighted_loss, backward=True)
    ours, theirs = trainee_gradients(trainee), hf_gradients(same, rows)
    names = sorted(ours)
    expected = flattened(hf_gradients(exact, rows), names)
    return {
        "micro_batches": len(batches),
        "logprob": float(stats.maxima["gap"]),
        "logprob_of_transformers": their_gap,
        "gradient": relative_gap(flattened(ours, names), expected),
        "gradient_of_transformers": relative_gap(flattened(theirs, names), expected),
    }


def learning(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, max_tokens: int
) -> dict[str, Any]:
    """Step on one batch: rewarded tokens must become likelier, punished ones rarer."""
    trainee = Trainee(make_hf_model(sizes, device, dtype), device, dtype, max_tokens=2048)
    generator = np.random.default_rng(9)
    rows = []
    for number, length in enumerate(generator.integers(max_tokens // 8, max_tokens, size=16)):
        row = make_row(generator, int(length), sizes.vocab, 0.5)
        sign = np.full(length, 1.0 if number % 2 else -1.0, dtype=np.float32)
        rows.append(dataclasses.replace(row, channels={**row.channels, Channel.ADVANTAGE: sign}))
    good, bad = rows[1::2], rows[::2]
    before = trainee.mean_logprob(good) - trainee.mean_logprob(bad)
    losses = []
    for _ in range(5):
        sums = trainee.step(rows, rate=1e-5).sums
        losses.append(float(sums["loss"] / sums["tokens"]))
    (optimizer,) = trainee.optimizer.chained_optimizers
    main = optimizer.optimizer.param_groups[0]["params"][0]
    return {
        "losses": losses,
        "rise": trainee.mean_logprob(good) - trainee.mean_logprob(bad) - before,
        "main_weight_dtype": str(main.dtype),
        "gradient_dtype": str(next(trainee.policy.gpt.parameters()).main_grad.dtype),
        "codec": codec(trainee),
    }


def offloaded_steps(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Steps on the same gradients with the optimizer's state here and on the host."""
    model = make_hf_model(SMALL, device, dtype)
    here, there = (Trainee(model, device, dtype, max_tokens=512) for _ in range(2))
    offload_optimizer(there.optimizer, device, chunk_elements=1 << 16)
    for seed in range(3):
        for trainee in (here, there):
            chance = torch.Generator(device).manual_seed(seed)
            for parameter in trainee.policy.gpt.parameters():
                parameter.main_grad.normal_(generator=chance)
            step_optimizer(trainee.optimizer, rate=1e-3)
    expected, offloaded = (
        [
            *trainee.policy.gpt.parameters(),
            *(tensor for moments in adam.state.values() for tensor in moments.values()),
            *(main for group in adam.param_groups for main in group["params"]),
        ]
        for trainee in (here, there)
        for adam in [trainee.optimizer.chained_optimizers[0].optimizer]
    )
    state = [tensor for tensor in offloaded if tensor.device.type == "cpu" and tensor.numel() > 1]
    return {
        "different": sum(
            not torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, offloaded, strict=True)
        ),
        "host_bytes": sum(tensor.numel() * tensor.element_size() for tensor in state),
        "parameters": sum(parameter.numel() for parameter in here.policy.gpt.parameters()),
        "is_pinned": device.type == "cpu" or all(tensor.is_pinned() for tensor in state),
    }


def codec(trainee: Trainee) -> dict[str, Any]:
    """Send every weight through buckets on the device."""
    specs = [
        TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch."))
        for name, shape, dtype in list_hf_specs(trainee.policy)
    ]
    buckets = plan_buckets(specs, bucket_bytes=16 << 20)
    buffers = PackingBuffers(trainee.policy.device)
    weights = {name: tensor.clone() for name, tensor in stream_hf_tensors(trainee.policy)}
    different = 0
    for bucket in buckets:
        packed = buffers.open_bucket_in_older_buffer(bucket)
        for spec in bucket.specs:
            packed.place_parameter(spec.name, weights[spec.name])
        tensors = packed.tensors
        different += sum(not torch.equal(tensors[name], weights[name]) for name in tensors)
    return {
        "buckets": len(buckets),
        "bytes": sum(bucket.size_bytes for bucket in buckets),
        "different": different,
    }


def findings(device: torch.device) -> dict[str, Any]:
    """Collect all figures that the tests check."""
    on_gpu = device.type == "cuda"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        "attention": {
            f"{name}, cp {cp}": attention_gaps(device, dtype, cp)
            for name, dtype in dtypes.items()
            for cp in (1, 2, 4)
        },
        "logprobs": {
            name: logprob_gaps(device, dtype, *((8192, 151936) if on_gpu else (300, 4000)))
            for name, dtype in dtypes.items()
        },
        "experts": {name: expert_gaps(device, dtype) for name, dtype in dtypes.items()},
        "parity": {name: parity(device, dtype) for name, dtype in dtypes.items()},
        "offload": {name: offloaded_steps(device, dtype) for name, dtype in dtypes.items()},
        "learning": (
            learning(device, torch.bfloat16, QWEN_HALF_BILLION, 400)
            if on_gpu
            else learning(device, torch.bfloat16, SMALL, 40)  # a CPU multiplies bfloat16 slowly
        ),
    }


def main() -> None:
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = open_lone_world(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(findings(device), indent=1))
    destroy_process_groups()


if __name__ == "__main__":
    main()
