"""What a template writes after a reply is the same whether the history is rendered or stood for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.session.tails import Tools, Variables, is_local, text_after_reply
from areal_hpc.session.template import ChatTemplate, Message, TemplateRefusal
from tests.support.chatml import CHATML
from tests.unit.session.families import FAMILIES

LOOP = "{%- for message in messages %}"
PRINT = "{{- '<' + message.role + '>' + (message.content or '') + '</>' }}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
ALTERNATING = (
    LOOP + "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}" + PRINT + END
)
TOOLS_LAST = (
    LOOP
    + "{%- if loop.last and tools %}{{- '[TOOLS]' + tools | tojson }}{%- endif %}"
    + PRINT
    + END
)
ODD = {
    "it numbers messages": LOOP + "{{- loop.index }}" + PRINT + END,
    "it counts messages": LOOP + PRINT + END + "{{- messages | length }}",
    "it remembers tools": LOOP
    + "{%- if message.role == 'tool' %}{%- set ns.used = true %}{%- endif %}"
    + "{%- if ns.used %}{{- '!' }}{%- endif %}"
    + PRINT
    + END,
    "it repeats the last question but one": LOOP
    + PRINT
    + "{%- if loop.index0 > 2 %}{{- messages[loop.index0 - 2].content }}{%- endif %}"
    + END,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def odd_template(name: str) -> ChatTemplate:
    return ChatTemplate("{%- set ns = namespace(used=false) %}" + ODD[name])


def wholly(
    template: ChatTemplate,
    messages: list[Message],
    reply_index: int,
    tools: Tools,
    variables: Variables,
) -> str | None:
    """What the template writes after the reply, by the definition."""
    mark = "the mark"
    marked = [*messages]
    marked[reply_index] = {"role": "assistant", "content": mark}
    try:
        text = template.render(marked, tools=tools, variables=variables)
    except TemplateRefusal:
        return None
    return text.partition(mark)[2]


def message(role: str, content: str) -> Message:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    called = {"tool_calls": [call]} if content == "call" and role == "assistant" else {}
    return {"role": role, "content": content, **called}


roles = st.sampled_from(["user", "assistant", "tool", "assistant", "user"])
contents = st.sampled_from(
    ["hi", "call", "<think>\nx\n</think>\n\ny", "<tool_response>", "", " z "]
)
messages = st.builds(message, roles, contents)
conversations = st.builds(
    lambda system, history, later: (system + history, later),
    st.sampled_from([[], [message("system", "Be brief.")]]),
    st.lists(messages, min_size=1, max_size=9),
    st.lists(messages, min_size=1, max_size=3),
)
TEMPLATES = {
    **{family.name: family.template for family in FAMILIES},
    "chatml": ChatTemplate(CHATML),
    "alternating": ChatTemplate(ALTERNATING),
    "tools last": ChatTemplate(TOOLS_LAST),
}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(
    conversation=conversations,
    tools=st.sampled_from([None, [TOOL]]),
    variables=st.sampled_from([None, {"enable_thinking": False}, {"style": "terse"}]),
)
def test_a_short_history_stands_for_a_long_one(
    name: str,
    conversation: tuple[list[Message], list[Message]],
    tools: Tools,
    variables: Variables,
) -> None:
    template = TEMPLATES[name]
    assert is_local(template)
    history, later = conversation
    whole = [*history, message("assistant", "so"), *later]
    expected = wholly(template, whole, len(history), tools, variables)
    if expected is not None:  # a history that was refused has not been answered
        assert text_after_reply(template, whole, len(history), tools, variables) == expected


@pytest.mark.parametrize("name", ODD)
def test_a_template_that_looks_back_is_found_out_and_rendered_wholly(name: str) -> None:
    template = odd_template(name)
    assert not is_local(template)
    places = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    whole = [message(role, f"{role} {number}") for number, role in enumerate(places)]
    expected = wholly(template, whole, 6, None, None)
    assert text_after_reply(template, whole, 6, None, None) == expected
