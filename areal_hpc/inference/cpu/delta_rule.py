"""Gated delta rule of Qwen3-Next and Qwen3.5 in plain torch, in place of SGLang's CPU kernels.

SGLang 0.5.23 imports the kernels from `sgl_kernel`, which PyPI has only for CUDA. Each public
function here replaces one: it has the same name and arguments, and changes the states of requests
in place. They compute token by token, which is fast enough for tiny models.

Shapes: T tokens of all requests, one request after another; C channels; W width of a convolution.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def install_kernels() -> None:
    """Install the functions; must run before SGLang imports its models."""
    module = types.ModuleType("sgl_kernel.mamba")
    namespace: Any = torch.ops.sgl_kernel
    imported: list[Callable[..., Any]] = [
        causal_conv1d_fn_cpu,
        causal_conv1d_update_cpu,
        chunk_gated_delta_rule_cpu,
    ]
    operators: list[Callable[..., Any]] = [
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_qkvzba_split_reshape_cat_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    ]
    for owner, functions in ((module, imported), (namespace, operators)):
        for function in functions:
            setattr(owner, function.__name__, function)
    # SGLang's models name it at their import, but call it only with AMX tiles.
    namespace.fused_input_proj_cpu = None
    sys.modules[module.__name__] = module


def replace_triton_norms() -> None:
    """Replace SGLang's norms and gates, which call Triton, by plain torch."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    def forward_fused(self: Any, x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> Any:
        normed = _normalize(x, self.eps) * self.weight.float()
        return (normed * F.silu(g.reshape(x.shape).float())).to(x.dtype)

    def forward(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> Any:
        normed = _normalize(x, self.eps) * self.weight.float()
        if z is not None:
            gate = torch.sigmoid if self.activation == "sigmoid" else F.silu
            normed = normed * gate(z.float())
        return normed.type_as(x)

    def gate(states: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return shared * torch.sigmoid(states @ weight.reshape(-1))[:, None]

    def add_gated(
        states: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
    ) -> None:
        out.add_(gate(states, weight, shared))

    fused_norm_gate.FusedRMSNormGated.forward = forward_fused
    layernorm_gated.RMSNorm.forward = forward
    elementwise.fused_gate_sigmoid_mul = gate
    elementwise.fused_gate_sigmoid_mul_add = add_gated


def _normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape)))


def fused_qk_gemma_rmsnorm_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _normalize_as_gemma(query.reshape(-1, head_dim), query_weight, eps),
        _normalize_as_gemma(key.reshape(-1, head_dim), key_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    query_and_gate: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_head = query_and_gate.reshape(len(query_and_gate), heads, 2 * head_dim)
    query, gate = (part.reshape(-1, head_dim) for part in by_head.chunk(2, -1))
    return (
        _normalize_as_gemma(query, query_weight, eps),
        _normalize_as_gemma(key.reshape(-1, head_dim), key_weight, eps),
        gate.contiguous(),
    )


def _normalize_as_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalize(x, eps) * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, ...]:
    """Split into queries, keys and values [T, C], gates [T, v_heads, v_dim], b, a [T, v_heads]."""
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    gates = qkvz[:, channels:].reshape(-1, v_heads, v_dim)
    parts = (qkvz[:, :channels], gates, ba[:, :v_heads], ba[:, v_heads:])
    return tuple(part.contiguous() for part in parts)


def fused_qkvzba_split_reshape_cat_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, ...]:
    """Split in the same way tensors that are interleaved by key head."""
    tokens, copies = len(qkvz), v_heads // k_heads
    sizes = [k_dim, k_dim, copies * v_dim, copies * v_dim]
    *qkv, gates = qkvz.view(tokens, k_heads, -1).split(sizes, -1)
    b, a = ba.view(tokens, k_heads, 2 * copies).chunk(2, -1)
    return (
        torch.cat([part.reshape(tokens, -1) for part in qkv], -1),
        gates.reshape(tokens, v_heads, v_dim).contiguous(),
        b.reshape(tokens, v_heads).contiguous(),
        a.reshape(tokens, v_heads).contiguous(),
    )


def fused_gdn_gating_cpu(
    log_decay: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log decays and the shares to write, both [1, T, v_heads]."""
    decays = -log_decay.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decays[None], torch.sigmoid(b.float()).to(b.dtype)[None]


def causal_conv1d_fn_cpu(
    x_CT: torch.Tensor,
    weight_CW: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    conv_states: Any = None,
    has_initial_state: Any = None,
    cache_indices: Any = None,
    query_start_loc: Any = None,
    **_: Any,
) -> torch.Tensor:
    history, convolved = weight_CW.shape[1] - 1, torch.empty_like(x_CT)
    for index, (first, last) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        if first == last:
            continue
        state = conv_states[int(cache_indices[index])][..., -history:]
        past = state if bool(has_initial_state[index]) else torch.zeros_like(state)
        inputs = torch.cat([past.to(x_CT.dtype), x_CT[:, first:last]], 1)
        rows = F.conv1d(inputs[None], weight_CW[:, None], bias, groups=len(weight_CW))[0]
        convolved[:, first:last] = _activate(rows, activation)
        state.copy_(inputs[:, -history:])
    return convolved


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight_CW: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    conv_state_indices: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve one token of each request [requests, C]."""
    history, convolved = weight_CW.shape[1] - 1, torch.empty_like(x)
    for index, state_index in enumerate(conv_state_indices.tolist()):
        state = conv_states[state_index][..., -history:]
        inputs = torch.cat([state.to(x.dtype), x[index][:, None]], 1)
        row = (inputs * weight_CW).sum(1)
        convolved[index] = _activate(row if bias is None else row + bias, activation)
        state.copy_(inputs[:, 1:])
    return convolved


def _activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return F.silu(x) if activation in ("silu", "swish") else x


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    initial_state_indices: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    indices = initial_state_indices
    out = _run_delta_rule(q, k, v, g, beta, initial_state, indices, cu_seqlens)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,  # SGLang's name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    a, b = (part.reshape(-1, part.shape[-1]) for part in (a, b))
    decays, shares = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states, indices = initial_state_source, initial_state_indices
    return _run_delta_rule(q, k, v, decays, shares, states, indices, cu_seqlens)


def _run_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decays: torch.Tensor,
    shares: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Update the states [v_heads, k_dim, v_dim] of all requests, token by token."""
    copies = value.shape[2] // query.shape[2]
    query, key = (_to_unit_length(part[0]).repeat_interleave(copies, 1) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    out = torch.empty_like(value)
    for index, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        state_index = int(state_indices[index])
        state = states[state_index].float()
        for token in range(first, last):
            state = state * decays[0, token].float().exp()[:, None, None]
            recalled = (state * key[token][:, :, None]).sum(1)
            change = (value[0, token].float() - recalled) * shares[0, token].float()[:, None]
            state = state + key[token][:, :, None] * change[:, None]
            out[0, token] = (state * query[token][:, :, None]).sum(1).to(out.dtype)
        if first < last:
            states[state_index] = state.to(states.dtype)
    return out


def _to_unit_length(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
