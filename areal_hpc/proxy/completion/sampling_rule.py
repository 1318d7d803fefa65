"""Whose sampling parameters a call has: its agent's, or the run's."""

from collections.abc import Sequence

import msgspec

from areal_hpc.proxy.engine.model_call import ModelCall
from areal_hpc.wire.proxy import StartSessionRequest

_BOUND_PARAMETERS = ("temperature", "top_p", "top_k")


def apply_bound_sampling_and_note_ignored(
    call: ModelCall, session: StartSessionRequest, unknown: Sequence[str]
) -> ModelCall:
    """The call with the run's sampling parameters, if its session is bound to them.

    Those of the request that are replaced are named as without effect, and so is what is `unknown`.
    """
    ignored = [*call.ignored, *unknown]
    sampling = call.sampling
    if session.sampling_from == "recipe":
        ours = {name: getattr(session.sampling, name) for name in _BOUND_PARAMETERS}
        ours["top_k"] = ours["top_k"] or -1
        ignored += [name for name in _BOUND_PARAMETERS if getattr(sampling, name) != ours[name]]
        sampling = msgspec.structs.replace(sampling, **ours)
    return msgspec.structs.replace(call, sampling=sampling, ignored=ignored)
