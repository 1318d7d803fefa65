"""Ways to say how hard to think become the variables that the chat template reads."""

from typing import Any

import pytest

from areal_hpc.proxy.dialects.validation import build_reasoning_variables
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from tests.support.chatml import CHATML, REASONING_CHATML, byte_level_tokenizer

GPT_OSS = "{{ reasoning_effort }}" + CHATML
BOTH = "{{ reasoning_effort }}" + REASONING_CHATML
DEEPSEEK = "{% if thinking is defined and thinking %}<think>{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "wish", "variables"),
    [
        (CHATML, {"effort": "high"}, {}),
        (CHATML, {"thinks": False}, {}),
        (CHATML, {}, {}),
        (REASONING_CHATML, {"effort": "none"}, {"enable_thinking": False}),
        (REASONING_CHATML, {"effort": "minimal"}, {"enable_thinking": True}),
        (REASONING_CHATML, {"thinks": True}, {"enable_thinking": True}),
        (REASONING_CHATML, {"effort": {"odd": 1}}, {}),
        (DEEPSEEK, {"thinks": False}, {"thinking": False}),
        (GPT_OSS, {"effort": "medium"}, {"reasoning_effort": "medium"}),
        (GPT_OSS, {"effort": "xhigh"}, {"reasoning_effort": "high"}),
        (GPT_OSS, {"effort": "none"}, {}),
        (GPT_OSS, {"effort": "sparkling"}, {}),
        (GPT_OSS, {"thinks": True}, {}),
        (BOTH, {"effort": "max"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        (BOTH, {"effort": "none"}, {"enable_thinking": False}),
    ],
)
def test_what_the_template_reads_is_set_and_the_rest_is_named(
    template: str, wish: dict[str, Any], variables: dict[str, Any]
) -> None:
    tokenizer = byte_level_tokenizer()
    model = ServedModel("m", ChatTemplate(template), TokenEncoder(tokenizer), 100)
    ignored: list[str] = []
    assert build_reasoning_variables(model, "wish", ignored, **wish) == variables
    assert ignored == (["wish"] if wish and not variables else [])
