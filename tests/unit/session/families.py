"""Small chat templates with the traits of the families of models."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from tests.support.chatml import byte_level_tokenizer

MARKS = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

_HERMES_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_HERMES_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}"
)
_HERMES_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
)


def _hermes(before: str = "", reasoning: str = "", prompt_end: str = "") -> str:
    """Build a template of Qwen; arguments stand before messages, a reply and the prompt's end."""
    return (
        _HERMES_TOOLS + before + "{%- for message in messages %}"
        "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{%- elif message.role == 'assistant' %}"
        "{{- '<|im_start|>assistant\n' }}"
        + reasoning
        + "{{- message.content }}"
        + _HERMES_CALLS
        + "{{- '<|im_end|>\n' }}"
        "{%- elif message.role == 'tool' %}" + _HERMES_RESULTS + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        + prompt_end
        + "{%- endif %}"
    )


QWEN25 = _hermes()
QWEN3 = _hermes(
    before="{%- set ns = namespace(last_query=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}",
    reasoning="{%- if loop.index0 > ns.last_query and message.reasoning_content %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}",
    prompt_end="{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
LLAMA3 = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\n\n' }}{%- endfor %}"
    "{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set function = message.tool_calls[0].function %}"
    '{{- \'{"name": "\' + function.name + \'", "parameters": \' }}'
    "{{- function.arguments | tojson + '}' }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
UNDELIMITED = (
    "{%- for message in messages %}"
    "{{- '### ' + message.role + ':\n' + message.content + '\n' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- call.function.name + call.function.arguments | tojson + '\n' }}{%- endfor %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '### assistant:\n' }}{%- endif %}"
)


def tokenizer() -> Tokenizer:
    """Return the tests' byte-level tokenizer with the marks of every family."""
    made = byte_level_tokenizer()
    made.add_special_tokens(MARKS)
    return made


@dataclass(frozen=True)
class Family:
    """Chat template, and the output format of its models."""

    name: str
    template: ChatTemplate
    end_of_turn: str
    """Text that ends a turn of the model."""
    calls: str
    """Format of a call, with `{name}` and `{arguments}` in it."""
    keeps_reasoning: bool = False


ENCODER = TokenEncoder(tokenizer())
_HERMES = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
FAMILIES = [
    Family("qwen2.5", ChatTemplate(QWEN25), "<|im_end|>", _HERMES),
    Family("qwen3", ChatTemplate(QWEN3), "<|im_end|>", _HERMES, keeps_reasoning=True),
    Family(
        "llama3",
        ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"}),
        "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}',
    ),
    Family("undelimited", ChatTemplate(UNDELIMITED), "<|endoftext|>", "{name}{arguments}"),
]
