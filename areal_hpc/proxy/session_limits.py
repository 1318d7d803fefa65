"""What one session may use of the model. What was said so far stays recorded."""

from __future__ import annotations

from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.sessions import Session


def refuse_beyond_limits(session: Session, choices: int) -> None:
    """Demand that the session may ask for `choices` replies more.

    The status is one that SDKs do not repeat by themselves.

    Raises:
        RequestRefused: 400, with the limit as its parameter.
    """
    limits = session.request.limits
    turns = len(session.tree) + session.in_flight - choices  # those of this call are in flight
    if limits.max_turns and turns + choices > limits.max_turns:
        raise RequestRefused(
            400,
            f"this episode may have {limits.max_turns} turns, {turns} were taken",
            key="limits.max_turns",
        )
    if limits.max_tokens and session.sampled_tokens >= limits.max_tokens:
        raise RequestRefused(
            400,
            f"this episode may sample {limits.max_tokens} tokens, "
            f"{session.sampled_tokens} were sampled",
            key="limits.max_tokens",
        )


def fit_into_episode(session: Session, max_new_tokens: int, choices: int) -> int:
    """The longest reply that the session has tokens left for, up to `max_new_tokens`."""
    most = session.request.limits.max_tokens
    if not most:
        return max_new_tokens
    return max(1, min(max_new_tokens, (most - session.sampled_tokens) // choices))
