"""What is left untrained: replies that cannot be, steps not taken, tickets and whole batches.

The trainer knows the softmax of the logits at the reply's temperature. What was sampled from
another distribution has log-probabilities of its own, and is left out of the loss: a gradient of
the plain softmax there is one of something that nobody did.
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_hpc.errors import NonFiniteGradientError, ShardError, UntrainableBatchError
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.wire.trajectory import CallRecord, SamplingMask, TrajectoryRow

MAX_UNTRAINABLE_FRACTION = 0.5
"""Of a batch's sampled tokens. Beyond, what is left is no sample of what the agent does."""
NO_TOP_K = 1 << 20
"""No vocabulary is larger: such a top_k leaves nothing out."""
_GRAMMAR_PARAMETERS = ("json_schema", "regex", "ebnf", "structural_tag")
_NEUTRAL_PENALTIES = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def list_sampling_distortions(
    sampling: Mapping[str, Any], *, is_recorded: bool = False
) -> Iterator[str]:
    """Names of the parameters by which a reply was not sampled from the softmax that is trained.

    That is one over the tokens that were left, if it `is_recorded` which these are.
    What is left out had SGLang's default. `min_new_tokens` is among them only where nobody wrote
    down which tokens it forbade (`forbid_end_tokens`).
    """
    if sampling.get("temperature", 1.0) == 0:
        yield "temperature=0"
    if sampling.get("top_p", 1.0) < 1 and not is_recorded:
        yield "top_p"
    if 0 < sampling.get("top_k", -1) < NO_TOP_K and not is_recorded:
        yield "top_k"
    if sampling.get("min_p", 0.0) > 0 and not is_recorded:
        yield "min_p"
    if any(sampling.get(name) is not None for name in _GRAMMAR_PARAMETERS) and not is_recorded:
        yield "a grammar"
    if sampling.get("min_new_tokens") and not sampling.get("stop_token_ids") and not is_recorded:
        yield "min_new_tokens"
    if sampling.get("logit_bias"):
        yield "logit_bias"
    for name, neutral in _NEUTRAL_PENALTIES.items():
        if sampling.get(name, neutral) != neutral:
            yield name


def get_reply_span(call: CallRecord) -> slice:
    return slice(call.prompt_tokens, call.prompt_tokens + call.reply_tokens)


def _list_reply_distortions(
    row: TrajectoryRow, call: CallRecord, is_recorded: bool = False
) -> list[str]:
    if row.sampling_mask is not None:
        counts = row.sampling_mask.counts_T[get_reply_span(call)]
        is_recorded |= len(counts) > 0 and bool(counts.all())
    return list(list_sampling_distortions(call.sampling, is_recorded=is_recorded))


def drop_distorted_replies_from_loss_mask(
    row: TrajectoryRow, mask_T: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """A loss mask of the row without the replies that were not sampled from the plain softmax."""
    spans = [get_reply_span(one) for one in row.record.calls if _list_reply_distortions(row, one)]
    if not spans:
        return mask_T
    mask_T = mask_T.copy()
    for span in spans:
        mask_T[span] = 0
    return mask_T


def forbid_end_tokens(row: TrajectoryRow) -> SamplingMask | None:
    """The row's sampling mask, with the tokens that `min_new_tokens` kept from being sampled.

    While it lasts no token can be sampled that ends a reply: the proxy asks for these by
    `stop_token_ids`. A place whose tokens were recorded keeps these.
    """
    mask = row.sampling_mask
    counts_T = np.zeros(row.num_tokens, np.uint16) if mask is None else mask.counts_T.copy()
    forbids_T = np.zeros(row.num_tokens, np.bool_)
    ids_of = dict[int, npt.NDArray[np.int32]]()
    for call in row.record.calls:
        ids = np.array(call.sampling.get("stop_token_ids") or [], np.int32)
        if not len(ids):
            continue
        least = min(call.sampling.get("min_new_tokens") or 0, call.reply_tokens)
        for place in range(call.prompt_tokens, call.prompt_tokens + least):
            if not counts_T[place]:
                forbids_T[place], ids_of[place] = True, ids
    if not ids_of:
        return mask
    if mask is not None:
        starts = np.cumsum([0, *mask.counts_T.tolist()]).tolist()
        for place in np.flatnonzero(mask.counts_T).tolist():
            ids_of[place] = mask.ids[starts[place] : starts[place + 1]]
    for place, ids in ids_of.items():
        counts_T[place] = len(ids)
    flat = np.concatenate([ids_of[place] for place in sorted(ids_of)])
    return SamplingMask(counts_T, flat, forbids_T)


def count_untrainable_tokens(
    batch: Sequence[TrajectoryRow], *, assumes_sampling_mask: bool = False
) -> Counter[str]:
    """Tokens of such replies, of those that the rows train, by all the reasons of their reply.

    With `assumes_sampling_mask` sampling masks are taken to be there.
    """
    tokens = Counter[str]()
    for row in batch:
        for call in row.record.calls:
            if reasons := " and ".join(_list_reply_distortions(row, call, assumes_sampling_mask)):
                tokens[reasons] += int(np.count_nonzero(row.loss_mask_T[get_reply_span(call)]))
    return +tokens


def check_trainable_share(step: int, sampled: int, untrainable: Mapping[str, int]) -> None:
    """Raise an UntrainableBatchError if more than half of a batch's tokens are untrainable."""
    total = sum(untrainable.values())
    if total <= MAX_UNTRAINABLE_FRACTION * sampled:
        return
    ranked = sorted(untrainable.items(), key=lambda one: (-one[1], one[0]))
    reasons = ", ".join(f"{name} ({tokens})" for name, tokens in ranked)
    raise UntrainableBatchError(
        f"batch {step}: {total} of {sampled} sampled tokens were not sampled from the plain "
        f"softmax, which is what is trained: {reasons}. At most half of a batch may be left out",
        key="rollout.agent.sampling",
        hint="set it to recipe, which replaces the agent's temperature, top_p and top_k, or "
        "rollout.record_sampling_mask=true, which makes top_p, top_k, min_p and grammars "
        "trainable; have the agent ask without others; areal-hpc quarantine sets this batch aside",
    )


MAX_CONSECUTIVE_UNTRAINED_BATCHES = 3
"""One has an odd row or a damaged file; with three one after another it is the weights, the
settings or the storage."""


def record_skipped_steps(
    norms: Sequence[float],
    step: int,
    earlier_records: Sequence[UntrainedBatchPart],
    *,
    key: str,
    name_step: Callable[[int], str],
    hint: str,
) -> list[UntrainedBatchPart]:
    """What the gradient norms of a batch's optimizer steps leave untrained: one entry, or none.

    Pure, and the same on all ranks, as the norms are. The streak is read from what earlier batches
    left, which checkpoints hold: a resumed run decides as the one that was not interrupted.
    An error names steps by `name_step`, the recipe's `key`, and gives `hint`.

    Raises:
        NonFiniteGradientError: A norm is not finite, in the last of
            `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    odd = [norm for norm in norms if not math.isfinite(norm)]
    if not odd:
        return []
    reason = (
        f"the gradient norm is {odd[0]}: {len(odd)} of {len(norms)} optimizer steps are not taken"
    )
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {one.step for one in earlier_records if not one.tickets and not one.quarantine}:
        raise NonFiniteGradientError(
            f"{name_step(step)}: {reason}, the same as at {' and '.join(map(name_step, before))}: "
            f"{MAX_CONSECUTIVE_UNTRAINED_BATCHES} batches in a row end the run",
            key=key,
            hint=hint,
        )
    return [UntrainedBatchPart(step, reason)]


def record_damaged_batch(
    step: int, earlier_records: Sequence[UntrainedBatchPart], reason: str, run_dir: Path
) -> UntrainedBatchPart:
    """The record of a batch that no rank can read. Pure, and the same on all ranks.

    The streak is read as in `record_skipped_steps`; batches set aside by hand do
    not belong to it.

    Raises:
        ShardError: This is the last of `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {one.step for one in earlier_records if one.quarantine == "damaged"}:
        run = shlex.quote(str(run_dir))
        raise ShardError(
            f"batch {step} cannot be read: {reason}; nor could "
            f"{' and '.join(f'batch {one}' for one in before)}: "
            f"{MAX_CONSECUTIVE_UNTRAINED_BATCHES} in a row end the run",
            key="shards/",
            hint=f"areal-hpc shards verify {run} names what is damaged: restore it from a copy, "
            f"undo with areal-hpc quarantine {run} {step - 1} --undo and so on, and resume; or go "
            f"on without batch {step} by areal-hpc quarantine {run} {step}",
        )
    return UntrainedBatchPart(step, reason, quarantine="damaged")


def is_optimizer_step_taken(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0.0


def build_norm_metrics(norms: Sequence[float], *, were_due: bool = True) -> dict[str, float]:
    """The largest gradient norm of a batch, and how many optimizer steps were not taken.

    A batch of which nothing is left counts as one step, not taken. Steps that were not due, as a
    critic warmed up, are not missed.
    """
    if not were_due:
        return {"grad_norm": 0.0, "step/skipped": 0, "step/nonfinite": 0}
    norms = norms or [0.0]
    return {
        "grad_norm": max(norms) if all(map(math.isfinite, norms)) else math.nan,
        "step/skipped": sum(not is_optimizer_step_taken(norm) for norm in norms),
        "step/nonfinite": sum(not math.isfinite(norm) for norm in norms),
    }
