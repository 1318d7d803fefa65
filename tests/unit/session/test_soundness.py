"""What of a model call keeps it out of its session, and what does not."""

from typing import Any

import msgspec
import pytest

from areal_hpc.session.call_records import find_interaction_defect
from areal_hpc.session.tree import InteractionTree, pack_counts_as_uint16, pack_ids, unpack_ids
from tests.unit.session.model_stub import say, user


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "parts, as a normalizer may make"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "7", "tool_call_id": "c", "more": {"of": "the user's own"}},
    ],
)
def test_messages_that_can_be_compared_are_sound(message: dict[str, Any]) -> None:
    call = say(InteractionTree(), [user("hi")], "hello")
    odd = msgspec.structs.replace(call, new_messages=[message])
    tree = InteractionTree()
    assert find_interaction_defect(odd, tree) is None
    tree.add(odd)
    other = msgspec.structs.replace(odd, interaction_id="other", reply=message)
    assert find_interaction_defect(other, tree) is None
    tree.add(other)


@pytest.mark.parametrize(
    ("places", "first", "is_sound"),
    [(0, 0, True), (-1, 0, False), (0, 1, False)],
    ids=["sound", "a place too few", "without the first token itself"],
)
def test_what_could_be_sampled_is_noted_of_every_token(
    places: int, first: int, is_sound: bool
) -> None:
    call = say(InteractionTree(), [user("hi")], "hello")
    ids = unpack_ids(call.output_ids).tolist()
    odd = msgspec.structs.replace(
        call,
        kept_counts=pack_counts_as_uint16([1] * (len(ids) + places)),
        kept_ids=pack_ids([ids[0] + first, *ids[1:]]),
    )
    defect = find_interaction_defect(odd, InteractionTree())
    assert (defect is None) is is_sound
    assert is_sound or "sampling mask" in str(defect)
