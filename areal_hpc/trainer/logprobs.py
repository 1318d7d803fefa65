"""Log-probabilities of tokens from vocabulary-parallel logits."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def token_logprobs(
    logits_TV: torch.Tensor,
    targets_N: torch.Tensor,
    labels_N: torch.Tensor,
    temperature_N: torch.Tensor | None,
    vocab: int,
) -> torch.Tensor:
    """Log p(label) at each target, in float32 [N].

    Args:
        logits_TV: This rank's part of the vocabulary, as the model's last stage gives it.
        targets_N: Places to read.
        labels_N: The token each predicts.
        temperature_N: Divides the logits, as the sampler did; None is 1 everywhere.
        vocab: Tokens of the tokenizer; columns beyond it are padding of the tensor-parallel split
            and take no probability.
    """
    logits_NV = logits_TV.index_select(0, targets_N).float()
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N[:, None]
    columns = logits_NV.shape[-1]
    real = vocab - columns * parallel_state.get_tensor_model_parallel_rank()
    if real < columns:
        padding = torch.arange(columns, device=logits_NV.device) >= real
        logits_NV = logits_NV.masked_fill(padding, torch.finfo(torch.float32).min)
    if columns >= vocab:
        return -torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
    losses_N: torch.Tensor = vocab_parallel_cross_entropy(logits_NV[:, None], labels_N[:, None])
    return -losses_N[:, 0]
