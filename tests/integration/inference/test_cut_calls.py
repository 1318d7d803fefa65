"""A call that a limit cut stays text, for every parser of SGLang and every prefix of its format."""

import json
import subprocess

import pytest

from tests.support.environments import CHECKOUT, python_of

PROGRAM = "tests.support.call_prefixes"
ARGUMENTS = {"cmd": "ls -la /tmp", "n": 12}
_JSON = json.dumps(ARGUMENTS)
_PAIRS = (
    "<arg_key>cmd</arg_key>\n<arg_value>ls -la /tmp</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>12</arg_value>"
)
_CODER = (
    "<tool_call>\n<function=bash>\n<parameter=cmd>\nls -la /tmp\n</parameter>\n"
    "<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
)


def _write_dsml(calls: str, space: str = "") -> str:
    mark = "\uff5cDSML\uff5c" + space
    return (
        f'<{mark}{calls}>\n<{mark}invoke name="bash">\n'
        f'<{mark}parameter name="cmd" string="true">ls -la /tmp</{mark}parameter>\n'
        f'<{mark}parameter name="n" string="false">12</{mark}parameter>\n'
        f"</{mark}invoke>\n</{mark}{calls}>"
    )


REPLIES = {
    "apertus2509": '<|tools_prefix|>[{"bash": ' + _JSON + "}]<|tools_suffix|>",
    "beam": (
        " to=bash<|channel|>analysis <|constrain|>xml<|message|><rfl:"
        'parameter name="cmd">\nls -la /tmp\n</rfl:parameter><rfl:param'
        'eter name="n">\n12\n</rfl:parameter><|call|>'
    ),
    "cohere_command4": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "bash", "parameters": '
    )
    + _JSON
    + "}]<|END_ACTION|>",
    "deepseekv3": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
        "function<\uff5ctool\u2581sep\uff5c>bash\n```json\n"
    )
    + _JSON
    + "\n```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    "deepseekv31": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
        "bash<\uff5ctool\u2581sep\uff5c>"
    )
    + _JSON
    + "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    "deepseekv32": _write_dsml("function_calls"),
    "deepseekv4": _write_dsml("tool_calls"),
    "deepseekv41": _write_dsml("calls", " "),
    "dots": '<dots_function_call>{"name": "bash", "arguments": ' + _JSON + "}</dots_function_call>",
    "gemma4": ('<|tool_call>call:bash{cmd:<|"|>ls -la /tmp<|"|>,n:12}<tool_call|>'),
    "gigachat3": 'function call<|role_sep|>\n{"name": "bash", "arguments": ' + _JSON + "}",
    "gigachat35": (
        '<\uff5cGCML\uff5ctool_calls><\uff5cGCML\uff5cinvoke name="bash"><\uff5cGCML\uff5cparameter'
        ' name="cmd" string="true">ls -la /tmp</\uff5cGCML\uff5cparameter><\uff5cGCM'
        'L\uff5cparameter name="n" string="false">12</\uff5cGCML\uff5cparameter></\uff5cG'
        "CML\uff5cinvoke></\uff5cGCML\uff5ctool_calls>"
    ),
    "glm45": "<tool_call>bash\n" + _PAIRS + "\n</tool_call>",
    "glm47": "<tool_call>bash" + _PAIRS.replace("\n", "") + "</tool_call>",
    "gpt-oss": (
        "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
    )
    + _JSON
    + "<|call|>",
    "hermes": '<tool_call>{"name": "bash", "arguments": ' + _JSON + "}</tool_call>",
    "hunyuan": "<tool_calls>\n<tool_call>bash<tool_sep>\n"
    + _PAIRS
    + "\n</tool_call>\n</tool_calls>",
    "inkling": ('<|message_model|>bash<|content_invoke_tool_json|>{"name":"bash","args":')
    + _JSON
    + "}<|end_message|>",
    "interns1": '<|action_start|> <|plugin|>\n{"name": "bash", "parameters": '
    + _JSON
    + "}<|action_end|>",
    "iquest_q1": "<iquest_tool_call>bash\n" + _PAIRS + "\n</iquest_tool_call>",
    "k2_horizon": '<ifm|tool_call>{"name": "bash", "arguments": ' + _JSON + "}</ifm|tool_call>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bas"
        "h:0<|tool_call_argument_begin|>"
    )
    + _JSON
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|'
        '><|open|>argument key="cmd" type="string"<|sep|>ls -la /tmp<'
        '|close|>argument<|sep|><|open|>argument key="n" type="number'
        '"<|sep|>12<|close|>argument<|sep|><|close|>call<|sep|><|clos'
        "e|>tools<|sep|>"
    ),
    "lfm2": ('<|tool_call_start|>[bash(cmd="ls -la /tmp", n=12)]<|tool_call_end|>'),
    "ling3": "<tool_call>bash\n" + _PAIRS + "\n</tool_call>",
    "llama3": '<|python_tag|>{"name": "bash", "parameters": ' + _JSON + "}",
    "mimo": (
        "<tool_call>\n<function=bash>\n<parameter=cmd>ls -la /tmp</para"
        "meter>\n<parameter=n>12</parameter>\n</function>\n</tool_call>"
    ),
    "minicpm5": (
        '<function name="bash"><param name="cmd">ls -la /tmp</param><'
        'param name="n">12</param></function>'
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="cm'
        'd">ls -la /tmp</parameter>\n<parameter name="n">12</parameter'
        ">\n</invoke>\n</minimax:tool_call>"
    ),
    "minimax-m3": (
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="bash">]<]'
        "minimax[>[<cmd>ls -la /tmp]<]minimax[>[</cmd>]<]minimax[>[<n"
        ">12]<]minimax[>[</n>]<]minimax[>[</invoke>]<]minimax[>[</too"
        "l_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "bash", "arguments": ' + _JSON + "}]",
    "muse": (
        "to=functions.bash<|message|><atem:function_calls>\n<atem:invo"
        'ke name="bash">\n<atem:parameter name="cmd">ls -la /tmp</atem'
        ':parameter>\n<atem:parameter name="n">12</atem:parameter>\n</a'
        "tem:invoke>\n</atem:function_calls><|eom|>"
    ),
    "nanbeige": _CODER,
    "poolside_v1": "<tool_call>bash\n" + _PAIRS + "\n</tool_call>",
    "pythonic": '[bash(cmd="ls -la /tmp", n=12)]',
    "qwen25": '<tool_call>\n{"name": "bash", "arguments": ' + _JSON + "}\n</tool_call>",
    "qwen3_coder": _CODER,
    "spark25": "<tool_call>bash\n"
    + _PAIRS.replace("</arg_key>\n", "</arg_key>")
    + "\n</tool_call>",
    "step3": (
        "<\uff5ctool_calls_begin\uff5c>\n<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>"
        '<steptml:invoke name="bash">\n<steptml:parameter name="cmd">l'
        's -la /tmp</steptml:parameter>\n<steptml:parameter name="n">1'
        "2</steptml:parameter>\n</steptml:invoke><\uff5ctool_call_end\uff5c>\n<\uff5ct"
        "ool_calls_end\uff5c>"
    ),
    "step3p5": _CODER,
    "trinity": '<tool_call>\n{"name": "bash", "arguments": ' + _JSON + "}\n</tool_call>",
}
"""Sample call of each parser that has a format of its own."""
ALIASES = {"glm": "glm45", "qwen": "qwen25"}
WITHOUT_END = {"beam", "gigachat3"}
"""Formats in which the parser takes a whole call and the beginning of another for text."""
NEEDS_MODELS_TEMPLATE = {"response_template"}


@pytest.fixture(scope="module")
def results() -> tuple[list[str], dict[str, dict[str, object]]]:
    """Run SGLang's Python on the replies, and return its parsers and their results."""
    program = [str(python_of("serve")), "-m", PROGRAM]
    ended = subprocess.run(
        program,
        cwd=CHECKOUT,
        input=json.dumps(REPLIES),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    names, judged = json.loads(ended.stdout.splitlines()[-1])
    return names, judged


def test_every_parser_is_asked(results: tuple[list[str], object]) -> None:
    assert {*results[0]} == {*REPLIES, *ALIASES, *NEEDS_MODELS_TEMPLATE}


@pytest.mark.parametrize("name", REPLIES)
def test_the_beginning_of_a_call_is_text_and_loses_nothing(
    results: tuple[object, dict[str, dict[str, object]]], name: str
) -> None:
    call = ["bash", ARGUMENTS]
    then_cut = [] if name in WITHOUT_END else [call]
    assert results[1][name] == {"whole": [call], "changed": [], "lost": [], "then_cut": then_cut}
