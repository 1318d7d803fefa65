"""Chat templates render as Hugging Face renders them, and fail with a name."""

import json
from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_hpc.errors import ChatTemplateError, RecipeError
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from tests.support.chatml import write_model_dir

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
    told = f"{{{{ message.{name} }}}}|{{{{ message.{name} is defined }}}}"
    expected = ImmutableSandboxedEnvironment().from_string(told)
    source = f"{{% set message = messages[0] %}}{told}"
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
