"""Journals written before a field existed are still read."""

import msgspec

from areal_hpc.proxy.sessions.events import InteractionAdded, decode_event, encode_event
from areal_hpc.session.tree import InteractionTree
from tests.unit.session.model_stub import say, user


def test_an_interaction_journaled_without_its_times_is_read() -> None:
    interaction = say(InteractionTree(), [user("a")], "one")
    record = msgspec.msgpack.decode(encode_event(InteractionAdded("s", interaction)))
    for field in ("asked_at", "answered_at"):
        del record["interaction"][field]
    event = decode_event(msgspec.msgpack.encode(record))
    assert isinstance(event, InteractionAdded)
    assert (event.interaction.asked_at, event.interaction.answered_at) == (0.0, 0.0)
