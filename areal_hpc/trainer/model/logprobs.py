"""Float32 logits, log-probabilities of tokens, and entropies.

The logits are by far the largest activation (151,936 columns for Qwen2.5), so no second tensor of
their size is ever made: chunks of rows that fit a cache are read in float32, whatever the dtype of
the logits, and the backward pass overwrites them with their gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from areal_hpc.trainer.model.elementwise import iterate_row_chunks

MIN_LOG_PROBABILITY = -1e3
"""Lower bound of log-probabilities, as of tokens that cannot be sampled: their exp is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleableTokens:
    """Tokens that could, or could not, be sampled at each of N positions; all could without any."""

    ids_K: torch.Tensor
    rows_K: torch.Tensor
    """Position that each token belongs to, ascending."""
    starts: Sequence[int]
    """On the host: index of the first token of each position, and the end [N + 1]."""
    forbids_N: torch.Tensor
    """Mask of positions whose tokens could not be sampled, while all others could."""

    def build_left_out_mask(self, rows: slice, first: int, columns: int) -> torch.Tensor | None:
        """Mark columns, counted from token `first`, that could not be sampled; None without any."""
        begin, end = self.starts[rows.start], self.starts[min(rows.stop, len(self.starts) - 1)]
        if begin == end:
            return None
        ids_K, rows_K = self.ids_K[begin:end] - first, self.rows_K[begin:end] - rows.start
        count = min(rows.stop, len(self.starts) - 1) - rows.start
        # Tokens of other ranks go to an extra column that is cut off: no mask selects elements.
        ids_K = torch.where((ids_K >= 0) & (ids_K < columns), ids_K, columns)
        forbids = self.forbids_N[rows]
        keeps_some = forbids.new_zeros(count)
        keeps_some[rows_K] = True
        left_out = (keeps_some & ~forbids)[:, None].repeat(1, columns + 1)
        left_out[rows_K, ids_K] = forbids[rows_K]
        return left_out[:, :columns]


def consume_logits_into_token_logprobs(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    temperature_N: torch.Tensor | None,
    vocab: int,
    group: dist.ProcessGroup,
    sampleable: SampleableTokens | None = None,
) -> torch.Tensor:
    """Return log p(label) in float32 [N]. A collective of the tensor-parallel group.

    The backward pass overwrites the logits, this rank's columns of the vocabulary: nothing else may
    read them afterwards. Columns beyond `vocab` are padding without probability. A temperature
    divides the logits, as in sampling; None is 1 everywhere. With `sampleable` the distributions
    cover only these tokens, which include the label.
    """
    logprobs_N: torch.Tensor
    logprobs_N, _ = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, labels_N, temperature_N, vocab, group, False, sampleable
    )
    return logprobs_N


def consume_logits_measuring_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    temperature_N: torch.Tensor | None,
    vocab: int,
    group: dist.ProcessGroup,
    sampleable: SampleableTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same bits, and the entropies of the labels' distributions in nats [N].

    Gradients flow through both.
    """
    both: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, labels_N, temperature_N, vocab, group, True, sampleable
    )
    return both


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function that keeps the logits and one log-sum-exp per row.

    Gradient of a row with p = softmax: g (onehot - p) / t through its log-probability, and
    -h p (log p + entropy) / t through its entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        temperature_N: torch.Tensor | None,
        vocab: int,
        group: dist.ProcessGroup,
        measures_entropy: bool,
        sampleable: SampleableTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = logits_NV.shape[1] * group.rank()
        real_NV = logits_NV[:, : vocab - first]
        is_own_N, columns_N = _find_own_columns(labels_N, first, real_NV.shape[1])
        chosen_N = real_NV.gather(1, columns_N[:, None])[:, 0].float()
        if temperature_N is not None:
            chosen_N = chosen_N / temperature_N
        lse_N = torch.empty_like(chosen_N)
        mean_N = torch.empty_like(chosen_N) if measures_entropy else None
        for rows in iterate_row_chunks(real_NV):
            values = real_NV[rows].float()
            if temperature_N is not None:
                values = values / temperature_N[rows, None]
            left_out = (
                None
                if sampleable is None
                else sampleable.build_left_out_mask(rows, first, values.shape[1])
            )
            if left_out is not None:
                values = values.masked_fill(left_out, -torch.inf)
            if mean_N is None:
                torch.logsumexp(values, -1, out=lse_N[rows])
            else:
                _compute_softmax_mean(values, lse_N[rows], mean_N[rows], left_out is not None)
        if group.size() > 1:
            chosen_N = torch.where(is_own_N, chosen_N, 0.0)
            dist.all_reduce(chosen_N, group=group)
            own_lse_N, lse_N = lse_N, _reduce_lse(lse_N, group)
            if mean_N is not None:
                mean_N *= (own_lse_N - lse_N).exp_()
                dist.all_reduce(mean_N, group=group)
        entropy_N = chosen_N.new_empty(0) if mean_N is None else lse_N - mean_N
        ctx.save_for_backward(logits_NV, labels_N, temperature_N, lse_N, entropy_N)
        ctx.first, ctx.vocab, ctx.kept = first, vocab, sampleable
        ctx.set_materialize_grads(False)
        return chosen_N - lse_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_N: torch.Tensor | None, slope_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits_NV, labels_N, temperature_N, lse_N, entropy_N = ctx.saved_tensors
        if gradient_N is None:
            gradient_N = torch.zeros_like(lse_N)
        real_NV = logits_NV[:, : ctx.vocab - ctx.first]
        is_own_N, columns_N = _find_own_columns(labels_N, ctx.first, real_NV.shape[1])
        if temperature_N is not None:
            gradient_N = gradient_N / temperature_N
            slope_N = None if slope_N is None else slope_N / temperature_N
        chosen_N = torch.where(is_own_N, gradient_N, 0.0)
        for rows in iterate_row_chunks(real_NV):
            logits = real_NV[rows]
            values = logits.float()  # the logits themselves when they are float32
            if temperature_N is not None:
                values.div_(temperature_N[rows, None])
            values.sub_(lse_N[rows, None])
            if slope_N is None:
                values.exp_().mul_(-gradient_N[rows, None])
            else:
                # Below the bound a probability is 0 in float32, times a finite number.
                factors = values.clamp(min=MIN_LOG_PROBABILITY).add_(entropy_N[rows, None])
                factors.mul_(slope_N[rows, None])
                values.exp_().mul_(factors.add_(gradient_N[rows, None]).neg_())
            if ctx.kept is not None:
                left_out = ctx.kept.build_left_out_mask(rows, ctx.first, values.shape[1])
                if left_out is not None:
                    values.masked_fill_(left_out, 0.0)
            values.scatter_add_(1, columns_N[rows, None], chosen_N[rows, None])
            if values.dtype != logits.dtype:
                logits.copy_(values)
        logits_NV[:, ctx.vocab - ctx.first :] = 0
        return logits_NV, None, None, None, None, None, None


def _find_own_columns(
    labels_N: torch.Tensor, first_column: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    local_N = labels_N - first_column
    is_own_N = (local_N >= 0) & (local_N < columns)
    return is_own_N, torch.where(is_own_N, local_N, 0)


def _compute_softmax_mean(
    values: torch.Tensor, lse: torch.Tensor, mean: torch.Tensor, is_partial: bool
) -> None:
    """Compute the log-sum-exp of each row, and the mean of its values under their softmax.

    The steps are those of `torch.logsumexp`, so that the exponentials can be used twice, and the
    sums have equal bits. If it `is_partial`, values, even all of a row, may be minus infinity.
    """
    top = values.amax(-1, keepdim=True)
    if is_partial:
        top = top.clamp(min=torch.finfo(top.dtype).min)
    shifted = values - top
    weights = shifted.exp()
    if is_partial:
        shifted = shifted.masked_fill(weights == 0, 0.0)
    total = weights.sum(-1)
    torch.log(total, out=lse)
    lse.add_(top[:, 0])
    torch.sum(weights.mul_(shifted), -1, out=mean)
    if is_partial:
        total = total.masked_fill(total == 0, 1.0)
    mean.div_(total).add_(top[:, 0])


def _reduce_lse(lse_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    top_N = lse_N.clone()
    dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
    share_N = (lse_N - top_N).exp_()
    dist.all_reduce(share_N, group=group)
    return top_N.add_(share_N.log_())


VOCAB_BLOCK_COLUMNS = 16384
"""Columns of the vocabulary whose gradient, or float32 weights, exist at a time."""


def compute_float32_logits(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Multiply states by weights, with sums in float32 [N, V]; gradients also sum in float32.

    Rounding logits to bfloat16 changes log-probabilities by .04 to .2 nat. Products of two bfloat16
    numbers are exact in float32, so that only the rounding of float32 sums remains.

    In the backward pass the gradient of the logits enters the products in the dtype of the states,
    for the GPU's matrix units.
    """
    logits_NV: torch.Tensor = _Float32Logits.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH
    )
    return logits_NV


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH)
        if weight_VH.is_cuda:
            return _matmul_to_float32(hidden_NH, weight_VH.T)
        shape = len(hidden_NH), len(weight_VH)
        logits_NV = hidden_NH.new_empty(shape, dtype=torch.float32)
        for block in _iterate_blocks(weight_VH):
            logits_NV[:, block] = _matmul_to_float32(hidden_NH, weight_VH[block].T)
        return logits_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_NH, weight_VH = ctx.saved_tensors
        hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        weight_gradient_VH = torch.empty_like(weight_VH)
        for block in _iterate_blocks(weight_VH):
            gradient = gradient_NV[:, block].to(hidden_NH.dtype)
            hidden_gradient_NH += _matmul_to_float32(gradient, weight_VH[block])
            weight_gradient_VH[block] = _matmul_to_float32(gradient.T, hidden_NH)
        return hidden_gradient_NH.to(hidden_NH.dtype), weight_gradient_VH


def _matmul_to_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _iterate_blocks(weight_VH: torch.Tensor) -> Iterator[slice]:
    for begin in range(0, len(weight_VH), VOCAB_BLOCK_COLUMNS):
        yield slice(begin, begin + VOCAB_BLOCK_COLUMNS)
