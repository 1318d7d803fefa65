"""Choice of sampling parameters: the request's or the run's, and whether masks are recorded."""

from collections.abc import Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall
from areal_hpc.session.call_records import decode_sampling_params_json
from areal_hpc.session.tool_turns import list_unpaired
from areal_hpc.session.tree import Interaction
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION, StartSessionRequest
from areal_hpc.wire.trajectory import GREEDY_TEMPERATURE_BOUND

_SGLANG_TRUNCATION_DEFAULTS = {"top_p": 1.0, "top_k": -1}


def enforce_sampling(
    call: ModelCall, session: StartSessionRequest, unknown_params: Sequence[str]
) -> ModelCall:
    """Replace a call's sampling parameters by the run's, if its session is bound to them.

    Those of the request that are replaced are named as without effect, and so are
    `unknown_params` and results of tools that belong to no call.
    """
    sampling, replaced = apply_enforced_sampling(call.sampling, session)
    ignored = [*call.ignored, *unknown_params, *replaced, *list_unpaired(call.messages)]
    return msgspec.structs.replace(call, sampling=sampling, ignored=ignored)


def apply_enforced_sampling(
    sampling: SamplingParams, session: StartSessionRequest
) -> tuple[SamplingParams, list[str]]:
    ours = _get_enforced_sampling(session)
    replaced = [name for name, value in ours.items() if getattr(sampling, name) != value]
    return (msgspec.structs.replace(sampling, **ours) if replaced else sampling), replaced


def correct_recorded_sampling(call: Interaction, session: StartSessionRequest) -> Interaction:
    """Correct a call that its client recorded with the parameters that it had asked for."""
    ours = _get_enforced_sampling(session)
    told = decode_sampling_params_json(call.sampling)
    asked = {**_SGLANG_TRUNCATION_DEFAULTS, **told, "temperature": call.temperature}
    replaced = [name for name, value in ours.items() if asked[name] != value]
    temperature = ours["temperature"] if replaced else call.temperature
    if is_greedy := 0 < temperature < GREEDY_TEMPERATURE_BOUND:
        temperature = 0.0
    if not replaced and not is_greedy:
        return call
    return msgspec.structs.replace(
        call,
        temperature=temperature,
        sampling=msgspec.json.encode(told | ours | {"temperature": temperature}),
        ignored=[*call.ignored, *(name for name in replaced if name not in call.ignored)],
    )


def zero_tiny_temperature(sampling: SamplingParams) -> SamplingParams:
    """Set a tiny temperature to 0, as the engine takes it and trainers know it.

    Else rows would say that logits were divided by next to nothing, and they were not.
    """
    if 0 < sampling.temperature < GREEDY_TEMPERATURE_BOUND:
        return msgspec.structs.replace(sampling, temperature=0.0)
    return sampling


def bound_top_k(
    sampling: SamplingParams, session: StartSessionRequest, vocab_size: int
) -> tuple[SamplingParams, bool]:
    """Bound `top_k` if the mask of a call is recorded; also say whether it is.

    For that SGLang needs a bound on their number.
    """
    if not (session.records_sampling_mask and sampling.has_recordable_sampling_mask):
        return sampling, False
    if 0 < sampling.top_k <= MAX_MASK_TOKENS_PER_POSITION:
        return sampling, True
    bound = min(vocab_size, MAX_MASK_TOKENS_PER_POSITION)
    return msgspec.structs.replace(sampling, top_k=bound), True


def _get_enforced_sampling(session: StartSessionRequest) -> dict[str, Any]:
    ours = session.sampling
    if session.sampling_from == "agent":
        return {}
    return {"temperature": ours.temperature, "top_p": ours.top_p, "top_k": ours.top_k or -1}
