"""Replies of `/generate` and their records, as a client that records its own calls sends them."""

from typing import Any

from areal_hpc.session.tree import Interaction, unpack_ids
from tests.support.proxy_stage import Stage


def generate_reply(stage: Stage, key: str, like: Interaction, **sampling: Any) -> None:
    assert like.parent_id is None
    body = {"input_ids": unpack_ids(like.new_ids).tolist(), "sampling_params": sampling}
    assert stage.post("/generate", body, key).status_code == 200


def change_call(call: Interaction, **fields: Any) -> dict[str, Any]:
    """The call as a client would send it under another id, with some fields replaced."""
    sent = {name: getattr(call, name) for name in call.__struct_fields__}
    return sent | {"interaction_id": "made-up"} | fields
