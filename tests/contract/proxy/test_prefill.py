"""A reply that goes on from what the client began: read by the model, recorded, continued."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.session.tree import unpack_ids
from tests.contract.proxy.talk import QUESTION, turn
from tests.support.chatml import CHATML, write_model_dir
from tests.support.proxy_stage import Stage

BEGUN = [*QUESTION, {"role": "assistant", "content": "It is"}]
ASKED: dict[str, dict[str, Any]] = {
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "prefix": {"messages": [*QUESTION, {**BEGUN[1], "prefix": True}]},
    "messages": {},
}
OPENING = "<|im_start|>assistant\nIt is"


def ask(stage: Stage, key: str, way: str, **more: Any) -> str:
    """What the model says to a reply that the client began, in one of the ways to do so."""
    route = "/messages" if way == "messages" else "/chat/completions"
    answer = stage.post(route, {"messages": BEGUN, **ASKED[way], **more}, key)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    text: str = (
        body["content"][0]["text"]
        if way == "messages"
        else body["choices"][0]["message"]["content"]
    )
    return text


@pytest.mark.parametrize("way", ASKED)
def test_the_model_goes_on_from_the_text_and_says_only_the_rest(stage: Stage, way: str) -> None:
    letters = stage.speak_in_letters(" seven")
    _, key = stage.open_session()
    assert ask(stage, key, way) == " seven"
    (request,) = stage.sglang.requests
    assert stage.prompt_of(request).endswith(f"3 + 4?<|im_end|>\n{OPENING}")
    stage.chat(key, [*QUESTION, *turn("It is seven")])
    stage.assert_continued(letters)
    (first, _) = stage.journaled(key)
    assert first.reply["content"] == "It is seven"
    assert unpack_ids(first.output_ids).tolist() == letters


def test_a_reply_is_begun_in_the_middle_of_a_recorded_conversation(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters(" seven")
    stage.chat(key, QUESTION)
    history = [*QUESTION, *turn(" seven"), {"role": "assistant", "content": "It is"}]
    assert ask(stage, key, "messages", messages=history) == " seven"
    stage.assert_continued(letters)
    assert stage.prompt_of(stage.sglang.requests[-1]).endswith(OPENING)


def test_a_message_of_the_assistant_that_is_not_to_be_continued_is_a_turn(
    stage: Stage, key: str
) -> None:
    assert stage.chat(key, BEGUN).status_code == 200
    (request,) = stage.sglang.requests
    assert stage.prompt_of(request).endswith("It is<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_template_prints_before_a_reply_stands_before_its_beginning(
    tmp_path: Path,
) -> None:
    reasoning = "<think>\n\n</think>\n\n"
    shown = f"('{reasoning}' if loop.last and message.role == 'assistant' else '')"
    template = CHATML.replace("+ message.content", f"+ {shown} + message.content")
    stage = Stage(tmp_path, model_dir=write_model_dir(tmp_path / "model", template=template))
    try:
        ask(stage, stage.open_session()[1], "prefix")
        prompt = stage.prompt_of(stage.sglang.requests[-1])
        assert prompt.endswith(f"assistant\n{reasoning}It is")
    finally:
        stage.close()


def test_a_template_that_hides_where_a_reply_begins_is_refused(tmp_path: Path) -> None:
    shown = "(message.content | upper if message.role == 'assistant' else message.content) +"
    template = CHATML.replace("message.content +", shown)
    stage = Stage(tmp_path, model_dir=write_model_dir(tmp_path / "model", template=template))
    try:
        answer = stage.post("/messages", {"messages": BEGUN}, stage.open_session()[1])
        assert answer.status_code == 400
        assert "does not tell where a reply's text begins" in answer.json()["error"]["message"]
    finally:
        stage.close()
