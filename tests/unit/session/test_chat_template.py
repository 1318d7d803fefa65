"""Chat templates of all traits render as Hugging Face renders them, or fail by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_hpc.errors import ChatTemplateError, RecipeError
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.open_turn import build_open_turn
from areal_hpc.session.tree import InteractionTree
from tests.support.chatml import write_model_dir
from tests.support.template_scenes import SCENES, build_template_and_encoder, play_scene
from tests.unit.session.model_stub import answer

MESSAGES = [{"role": "user", "content": "<é>"}]


LOOP = "{% for m in [1, 2] %}\n  {% if m == 2 %}{% break %}{% endif %}\n{{ m }}\n{% endfor %}\n"


@pytest.mark.parametrize(
    ("source", "rendering"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ bos_token }}{{ mood }}", "<s>calm"),
        (LOOP, "1\n"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
    ],
    ids=["json keeps letters", "tokens and variables", "trimmed blocks and break", "generation"],
)
def test_a_template_is_rendered_as_hugging_face_does(source: str, rendering: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render_prompt(MESSAGES, variables={"mood": "calm"}) == rendering


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
    ],
)
def test_a_template_that_raises_or_reaches_for_the_interpreter_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render_prompt(MESSAGES)


@pytest.mark.parametrize("name", ["role", "items", "get", "__class__", "__mro__", "missing"])
def test_a_message_has_the_attributes_that_jinja_gives_it(name: str) -> None:
    message = {"role": "user", "items": 1, "__class__": 2, "__mro__": 3}
    printed = f"{{{{ message.{name} }}}}|{{{{ message.{name} is defined }}}}"
    expected = ImmutableSandboxedEnvironment().from_string(printed)
    source = f"{{% set message = messages[0] %}}{printed}"
    try:
        rendered = expected.render(message=message)
    except SecurityError:
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source).render_prompt([message])
    else:
        again = ChatTemplate(source).render_prompt([message])
        assert again.partition(" at 0x")[0] == rendered.partition(" at 0x")[0]


def test_a_broken_template_is_the_users_to_mend() -> None:
    with pytest.raises(RecipeError, match="does not parse"):
        ChatTemplate("{% for %}")


def test_the_template_file_wins_over_the_tokenizer_configuration(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    assert (
        ChatTemplate.from_model_dir(tmp_path).render_prompt(MESSAGES).startswith("<|im_start|>user")
    )
    (tmp_path / "chat_template.jinja").write_text("from the file {{ eos_token }}")
    assert (
        ChatTemplate.from_model_dir(tmp_path).render_prompt(MESSAGES) == "from the file <|im_end|>"
    )


def test_named_templates_mean_the_default(tmp_path: Path) -> None:
    entry = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert ChatTemplate.from_model_dir(tmp_path).render_prompt(MESSAGES) == "d"


def test_a_model_without_template_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no chat template"):
        ChatTemplate.from_model_dir(tmp_path)
    with pytest.raises(RecipeError, match=r"no tokenizer\.json"):
        TokenEncoder.from_model_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match="damaged"):
        TokenEncoder.from_model_dir(tmp_path)


def test_the_vocabulary_is_the_models(tmp_path: Path) -> None:
    encoder = TokenEncoder.from_model_dir(write_model_dir(tmp_path, vocab_size=600))
    assert encoder.vocab_size == 600
    assert encoder.decode(encoder.encode("<|im_start|>héllo")) == "<|im_start|>héllo"


_START = "{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
_RESULT = "{% if m.role == 'tool' %}<r>{{ m.content }}</r>{% else %}"
_NAMES = (
    "{% for c in m.tool_calls or [] %}"
    "<c>{{ c.function.name }}{{ c.function.arguments | tojson }}</c>{% endfor %}"
)
_TURN = "<{{ m.role }}>{{ m.content or '' }}"
TRAITS = {
    "a result only after its call": _START
    + "{% if m.role == 'tool' %}"
    + "{% if not loop.previtem.tool_calls and loop.previtem.role != 'tool' %}"
    + "{{ raise_exception('no call before') }}{% endif %}<r>{{ m.content }}</r>{% else %}"
    + _TURN
    + _NAMES
    + "<e>{% endif %}"
    + _END,
    "a result with the call": _START
    + "{% if m.role != 'tool' %}"
    + _TURN
    + _NAMES
    + "{% if m.tool_calls %}{% for r in messages if r.role == 'tool' %}"
    + "{% if r.tool_call_id in m.tool_calls | map(attribute='id') %}"
    + "<r>{{ r.content }}</r>{% endif %}"
    + "{% endfor %}{% else %}<e>{% endif %}{% endif %}"
    + _END,
    "turns end in two tokens": _START + _RESULT + _TURN + _NAMES + "<e1><e2>{% endif %}" + _END,
    "calls end a turn otherwise": _START
    + _RESULT
    + _TURN
    + _NAMES
    + "{% if m.tool_calls %}<called>{% else %}<e>{% endif %}{{ '\n' }}{% endif %}"
    + _END,
    "the last turn ends otherwise": _START
    + _RESULT
    + _TURN
    + _NAMES
    + "{% if loop.last and not add_generation_prompt and m.role == 'assistant' %}<over>"
    + "{% else %}<e>{% endif %}{% endif %}"
    + _END,
    "arguments are joined as text": _START
    + _RESULT
    + _TURN
    + "{% for c in m.tool_calls or [] %}{{ '<c>' + c.function.arguments + '</c>' }}{% endfor %}"
    + "<e>{% endif %}"
    + _END,
    "one call at a time, without text": _START
    + _RESULT
    + "{% if m.tool_calls %}"
    + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + "<assistant><c>{{ m.tool_calls[0].function.arguments | tojson }}</c><e>"
    + "{% else %}<{{ m.role }}>{{ m.content }}<e>{% endif %}{% endif %}"
    + _END,
}


TRAITS["results under the ids of calls"] = (
    _START
    + "{% if m.role == 'tool' %}<r>{{ m.tool_call_id }}: {{ m.content }}</r>{% else %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}<c>{{ c.id }}<|tool_call_argument_begin|>"
    + "{{ c.function.arguments | tojson }}</c>{% endfor %}<e>{% endif %}"
    + _END
)
_MISTRAL_IDS = "{% if c.id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}<c>"
TRAITS["ids of nine letters"] = TRAITS["turns end in two tokens"].replace("<c>", _MISTRAL_IDS)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("trait", TRAITS)
def test_the_model_reads_each_result_once_and_one_end_of_turn(trait: str, scene: str) -> None:
    for turn in play_scene(TRAITS[trait], SCENES[scene]):
        assert (turn.is_spliced, turn.lost, turn.is_closed_twice) == (True, [], False)
        assert turn.outcome != "other"


def _tool_turn(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "function": {"name": "bash", "arguments": arguments}}
    return [
        normalize_chat_message(message)
        for message in (
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "RESULT"},
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "<r>RESULT</r>"),
        (None, "<r>RESULT</r>"),
        ("null", "<r>RESULT</r>"),
        ("[]", "<r>RESULT</r>"),
        ('{"cmd": "ls', '<c>arguments={"cmd": "ls</c>'),
        ('["a"]', "<c>arguments=['a']</c>"),
        ('{"cmd": "ls"}', "<c>cmd=ls</c>"),
    ],
)
def test_arguments_that_are_no_object_are_shown(arguments: str | None, written: str) -> None:
    items = (
        "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
        "<c>{{ k }}={{ v }}</c>{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(_START + _RESULT + _TURN + items + "{% endif %}" + _END)
    assert written in template.render_prompt(_tool_turn(arguments))


def test_a_template_that_prints_arguments_as_they_are_is_given_text() -> None:
    printed = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    template = ChatTemplate(_START + _RESULT + _TURN + printed + "{% endif %}" + _END)
    assert '{"cmd": "ls"}' in template.render_prompt(_tool_turn('{"cmd": "ls"}'))
    assert '{"cmd": "ls<r>' in template.render_prompt(_tool_turn('{"cmd": "ls'))


@pytest.mark.parametrize(
    ("trait", "complaint"),
    [
        ("{% if m.role != 'tool' %}" + _TURN + "{% endif %}", "leaves out messages of role tool"),
        ("{% if m.role == 'tool' %}{{ raise_exception('never') }}{% endif %}" + _TURN, "never"),
    ],
)
def test_a_template_without_results_of_tools_is_refused(trait: str, complaint: str) -> None:
    template = ChatTemplate(_START + trait + _END)
    template.require_messages(with_tools=False)
    with pytest.raises(RecipeError, match=complaint):
        template.require_messages(with_tools=True)
    ChatTemplate(TRAITS["a result with the call"]).require_messages(with_tools=True)


def test_a_template_that_takes_no_texts_is_refused() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(RecipeError, match="leaves out messages of role user"):
        ChatTemplate(source).require_messages(with_tools=False)


def test_reasoning_is_shown_to_a_template_that_calls_it_thinking() -> None:
    source = _START + "{{ m.thinking }}{{ m.content }}" + _END
    message = {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}
    assert "3 + 47" in ChatTemplate(source).render_prompt([message])


def test_kimis_calls_are_numbered_through_the_conversation() -> None:
    template = ChatTemplate(TRAITS["results under the ids of calls"])
    ids = ("call_a", "call_b", "call_c")
    calls = [{"id": id_, "function": {"name": f"do_{id_[-1]}", "arguments": "{}"}} for id_ in ids]
    results = [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in ids]
    replies = [{"role": "assistant", "tool_calls": part} for part in (calls[:2], calls[2:])]
    messages: list[Any] = [replies[0], results[1], results[0], replies[1], results[2]]
    written = template.render_prompt([normalize_chat_message(message) for message in messages])
    assert re.findall(r"functions\.\w+:\d", written) == [
        *("functions.do_a:0", "functions.do_b:1", "functions.do_b:1", "functions.do_a:0"),
        *("functions.do_c:2", "functions.do_c:2"),
    ]
    assert "<r>functions.do_b:1: call_b</r>" in written


def test_a_call_that_was_cut_before_its_turn_was_closed_is_closed_by_the_template() -> None:
    source = TRAITS["calls end a turn otherwise"]
    template, encoder = build_template_and_encoder(source)
    tree, (question, call, result) = InteractionTree(), _tool_turn('{"cmd": "ls"}')
    turn = build_open_turn(tree, [question], template, encoder)
    new_ids = encoder.encode(turn.new_text)
    output = encoder.encode('<c>bash{"cmd": "ls"}</c>')
    answer(tree, turn, new_ids, call, output, closed=False)
    added = build_open_turn(tree, [question, call, result], template, encoder)
    assert added.new_text == "<called>\n<r>RESULT</r><assistant>"


def test_a_history_that_a_template_refuses_is_still_refused_where_its_ids_are_unknown() -> None:
    template, encoder = build_template_and_encoder(TRAITS["one call at a time, without text"])
    scene = SCENES["parallel calls"]
    with pytest.raises(ChatTemplateError, match="one"):
        build_open_turn(InteractionTree(), scene, template, encoder)
