"""The order of tokens by expert: stable, and its way back is the way there, turned round."""

import torch

from areal_hpc.trainer.model.kernels.expert_order import plan_expert_order

TOKENS, EXPERTS, PER_TOKEN, HIDDEN = 37, 8, 3, 5


def route(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts each token visits, and the weights of all."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    chosen = scores.topk(PER_TOKEN, 1).indices
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, value=True), scores


def test_rows_are_sorted_by_expert_and_then_by_token() -> None:
    is_visited_TE, scores_TE = route()
    order = plan_expert_order(is_visited_TE, PER_TOKEN)
    expected = [
        (expert, token)
        for expert in range(EXPERTS)
        for token in range(TOKENS)
        if is_visited_TE[token, expert]
    ]
    experts_R = order.experts_TK.flatten()[order.visits_R].tolist()
    tokens_R = (order.visits_R // PER_TOKEN).tolist()
    assert list(zip(experts_R, tokens_R, strict=True)) == expected
    weights = torch.stack([scores_TE[token, expert] for expert, token in expected])
    assert torch.equal(order.pick_weights(scores_TE), weights)


def test_values_and_gradients_there_and_back() -> None:
    order = plan_expert_order(route()[0], PER_TOKEN)
    generator = torch.Generator().manual_seed(3)
    tokens_TH = torch.randn(
        TOKENS, HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True
    )
    rows_RH = torch.randn(
        TOKENS * PER_TOKEN, HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True
    )
    assert torch.equal(order.spread(tokens_TH), tokens_TH[order.visits_R // PER_TOKEN])
    summed = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    summed.index_add_(0, order.visits_R // PER_TOKEN, rows_RH.detach())
    torch.testing.assert_close(order.sum_rows_per_token(rows_RH).detach(), summed)
    assert torch.autograd.gradcheck(order.spread, (tokens_TH,))
    assert torch.autograd.gradcheck(order.sum_rows_per_token, (rows_RH,))


def test_an_empty_pack_has_an_order() -> None:
    order = plan_expert_order(torch.zeros(0, EXPERTS, dtype=torch.bool), PER_TOKEN)
    assert order.spread(torch.zeros(0, HIDDEN)).shape == (0, HIDDEN)
    assert order.sum_rows_per_token(torch.zeros(0, HIDDEN)).shape == (0, HIDDEN)
