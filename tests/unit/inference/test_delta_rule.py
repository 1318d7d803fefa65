"""SGLang's gated delta rule in plain torch computes what transformers computes."""

from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from areal_hpc.inference.cpu import delta_rule

LENGTHS = (5, 1, 9)
K_HEADS, V_HEADS, DIM = 2, 4, 8
STARTS = torch.tensor([0, 5, 6, 15])
PLACES = torch.tensor([3, 0, 2])
"""Indices of the requests' states among all states."""


def test_prompts_and_single_tokens_leave_the_states_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(LENGTHS)
    q, k = draw(1, tokens, K_HEADS, DIM), draw(1, tokens, K_HEADS, DIM)
    v = draw(1, tokens, V_HEADS, DIM)
    decays, shares = -draw(1, tokens, V_HEADS).abs(), draw(1, tokens, V_HEADS).sigmoid()
    states = torch.zeros(4, V_HEADS, DIM, DIM)
    output, _, _ = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, decays, shares, states, STARTS, PLACES
    )
    for row, slot in enumerate(PLACES.tolist()):
        part = slice(int(STARTS[row]), int(STARTS[row + 1]))
        copies = V_HEADS // K_HEADS
        expected, last = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            q[:, part].repeat_interleave(copies, 2), k[:, part].repeat_interleave(copies, 2),
            v[:, part], g=decays[:, part], beta=shares[:, part],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert torch.allclose(output[:, part], expected, atol=1e-5)
        assert torch.allclose(states[slot], last[0], atol=1e-5)
    A_log, dt_bias = draw(V_HEADS), draw(V_HEADS)
    a, b = draw(3, V_HEADS), draw(3, V_HEADS)
    decays, shares = delta_rule.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    before = states.clone()
    one_each = torch.arange(4)
    news = delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log, dt_bias, q[:, :3], k[:, :3], v[:, :3], a, b, states, PLACES, one_each
    )
    for row, slot in enumerate(PLACES.tolist()):
        expected, last = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            q[:, row][:, None].repeat_interleave(2, 2), k[:, row][:, None].repeat_interleave(2, 2),
            v[:, row][:, None], g=decays[:, row][:, None], beta=shares[:, row][:, None],
            initial_state=before[slot][None], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert torch.allclose(news[:, row : row + 1], expected, atol=1e-5)
        assert torch.allclose(states[slot], last[0], atol=1e-5)


def test_a_convolution_goes_on_where_the_last_call_ended() -> None:
    channels, width = 6, 4
    x, weight = torch.randn(channels, 12), torch.randn(channels, width)
    whole = modeling_qwen3_5.causal_conv1d_fn(x[None], weight, None, "silu")[0]
    states = torch.zeros(2, channels, width - 1)
    where: dict[str, Any] = {"conv_states": states, "cache_indices": torch.tensor([1])}
    parts = []
    for first, last in ((0, 2), (2, 11)):
        parts.append(
            delta_rule.causal_conv1d_fn_cpu(
                *(x[:, first:last], weight, None, "silu"),
                **where,
                has_initial_state=torch.tensor([first > 0]),
                query_start_loc=torch.tensor([0, last - first]),
            )
        )
    end = delta_rule.causal_conv1d_update_cpu(
        x[:, 11][None], states, weight, None, "silu", torch.tensor([1])
    )
    assert torch.allclose(torch.cat([*parts, end.T], 1), whole, atol=1e-6)
    assert torch.equal(states[0], torch.zeros_like(states[0]))
