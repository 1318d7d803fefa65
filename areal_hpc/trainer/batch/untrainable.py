"""Replies that cannot be trained as they were sampled: which they are, and when they are too many.

The trainer knows the softmax of the logits at the reply's temperature. What was sampled from
another distribution has log-probabilities of its own, and is left out of the loss: a gradient of
the plain softmax there is one of something that nobody did.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_hpc.errors import UntrainableBatchError
from areal_hpc.wire.row_record import CallRecord
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow

MAX_UNTRAINABLE_FRACTION = 0.5
"""Of a batch's sampled tokens. Beyond, what is left is no sample of what the agent does."""
NO_TOP_K = 1 << 20
"""No vocabulary is larger: such a top_k leaves nothing out."""
_DISTORTIONS_PREVENTED_BY_RECIPE = ("temperature=0", "top_p", "top_k")
"""What `rollout.agent.sampling=recipe` keeps agents from asking for."""
_DISTORTIONS_CURED_BY_RECORDING = ("top_p", "top_k", "min_p", "a grammar")
"""What `rollout.record_sampling_mask` makes trainable."""
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


def raise_if_mostly_untrainable(step: int, sampled: int, untrainable: Mapping[str, int]) -> None:
    """Raise an UntrainableBatchError if more than half of a batch's tokens are untrainable."""
    total = sum(untrainable.values())
    if total <= MAX_UNTRAINABLE_FRACTION * sampled:
        return
    ranked = sorted(untrainable.items(), key=lambda one: (-one[1], one[0]))
    reasons = ", ".join(f"{name} ({tokens})" for name, tokens in ranked)
    names = sorted({name for one in untrainable for name in one.split(" and ")})
    raise UntrainableBatchError(
        f"batch {step}: {total} of {sampled} sampled tokens were not sampled from the plain "
        f"softmax, which is what is trained: {reasons}. At most half of a batch may be left out",
        key="rollout.agent.sampling",
        hint=f"{_suggest_recipe_changes(names)}; areal-hpc quarantine sets this batch aside",
    )


def _suggest_recipe_changes(names: Sequence[str]) -> str:
    if all(name in _DISTORTIONS_PREVENTED_BY_RECIPE for name in names):
        return "set it to recipe, which replaces the agent's temperature, top_p and top_k"
    if all(name in _DISTORTIONS_CURED_BY_RECORDING for name in names):
        return "set rollout.record_sampling_mask=true"
    others = ", ".join(
        name
        for name in names
        if name not in (*_DISTORTIONS_PREVENTED_BY_RECIPE, *_DISTORTIONS_CURED_BY_RECORDING)
    )
    return f"have the agent ask without {others or ', '.join(names)}"
