"""How long the parties of an update wait for one another; all follows from one setting. Pure.

`update_timeout_s` is `weights.update_timeout_s`: the longest wait for weights on their way.
"""

from __future__ import annotations

CONNECT_S = 5.0
"""A control proxy accepts connections at once, whatever its servers do: longer means it is gone."""
GIVE_UP_S = 2.0
"""Replicas that are given up are told so once, and mostly cannot hear it."""


def get_control_deadline_s(update_timeout_s: float) -> float:
    """Deadline of a call that moves no weights."""
    return min(30.0, update_timeout_s)


def get_step_deadline_s(update_timeout_s: float) -> float:
    """How long a group may take for one step of an update, while the other groups stand still.

    Longer than any single wait, so that what is reported is which wait was in vain.
    """
    return update_timeout_s + CONNECT_S


def get_sender_timeout_s(update_timeout_s: float) -> float:
    """How long a replica may hear nothing of a sender that lives: the deadline that cells keep.

    Groups take the steps of an update together. A replica that is done with one waits until the
    slowest group is, or was left out of the update, and until the replicas that were left out
    have been told: connecting to them and being answered may each take `GIVE_UP_S`. Between two
    steps the sender gathers, packs and hashes the next bucket, which may take as long as sending
    one.
    """
    return get_step_deadline_s(update_timeout_s) + 2 * GIVE_UP_S + update_timeout_s
