"""Chat template rendering with Jinja and tokenization with `tokenizers`, without transformers."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_hpc.errors import ChatTemplateError, RecipeError
from areal_hpc.session.fast_bpe import CachedAsciiBPEEncoder

# For one text at a time the thread pool of the Rust encoder costs more than it saves.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

TOKENIZER_CHARS_IN_2_MS = 8192
"""Characters that the tokenizer encodes in about 2 ms."""
WORD_ENCODER_CHARS_IN_2_MS = 32768
_THINKING_FIELD_PATTERN = re.compile(r"\bthinking\b")
_KIMI_MARK = "<|tool_call_argument_begin|>"
"""Mark that templates of Kimi K2 write after the id of a call."""
Message = dict[str, Any]
"""Chat message in normal form (see `message_matching.normalize_chat_message`)."""


_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOL_CONVERSATION: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "the result of a tool", "tool_call_id": "call00001"},
]
"""Conversation with which the behavior of a template is tested."""


_GENERATION_MARK = "generation_mark"
"""Variable whose text stands at both ends of a `{% generation %}` block; unset: nothing does."""


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        block = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.Output([nodes.Name(_GENERATION_MARK, "load")]).set_lineno(line)
        return [mark, *block, mark]


class _JinjaSandbox(ImmutableSandboxedEnvironment):
    """Sandbox with a fast path for `message.role`.

    Jinja looks for an attribute of an object before a key; a message has only keys.
    """

    _attributes_of_dicts = frozenset(dir(dict))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in self._attributes_of_dicts:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """Chat template of a model, rendered in a sandbox.

    The environment is that of `transformers.utils.chat_template_utils`: `tojson`,
    `raise_exception`, `strftime_now`, loop controls, trimmed blocks, special tokens by name.
    """

    def __init__(
        self, template_source: str, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        environment = _JinjaSandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._globals = {**environment.globals, **(special_tokens or {})}
        self._reads_thinking = "reasoning_content" not in template_source and bool(
            _THINKING_FIELD_PATTERN.search(template_source)
        )
        self._numbers_calls = _KIMI_MARK in template_source
        try:
            self._template = environment.from_string(template_source)
            names = meta.find_undeclared_variables(environment.parse(template_source))
            self.variables = frozenset(names - {_GENERATION_MARK})
            """Names that the template reads from its environment or a request."""
            self.marks_replies = _GENERATION_MARK in names
            """Whether `{% generation %}` blocks say what a model writes."""
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(
                f"the chat template does not parse: {error}",
                hint="fix chat_template in tokenizer_config.json or chat_template.jinja",
            ) from error

    @classmethod
    def from_model_dir(cls, model_dir: Path) -> ChatTemplate:
        """Read the template of a model in Hugging Face format; RecipeError without a valid one."""
        config = read_json(model_dir / "tokenizer_config.json")
        template_file = model_dir / "chat_template.jinja"
        source = config.get("chat_template")
        if template_file.exists():
            source = template_file.read_text()
        elif isinstance(source, list):  # named texts
            source = {item["name"]: item["template"] for item in source}.get("default")
        if source is None:
            raise RecipeError(
                f"{model_dir} has no chat template",
                hint="add chat_template.jinja, or `chat_template` to tokenizer_config.json",
            )
        special_tokens: dict[str, str] = {}  # `bos_token`, `eos_token`, ... as text
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special_tokens[name] = text
        return cls(source, special_tokens)

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        opens_reply: bool = True,
    ) -> str:
        """Return the text that the model reads, which ends with the opening of the reply.

        Messages are in normal form; `variables` are a request's `chat_template_kwargs`. Without
        `opens_reply` the text ends with the last message. A template may accept call ids or
        arguments in one form only: later forms are tried after an error.
        """
        if self._reads_thinking:
            messages = [
                {**m, "thinking": thought} if (thought := m.get("reasoning_content")) else m
                for m in messages
            ]
        for message in messages:  # `any` takes twice as long
            if "tool_calls" in message:
                break
        else:
            return self._render(messages, tools, variables, opens_reply)
        if self._numbers_calls:
            messages = _rename_calls(
                messages, lambda call, number: f"functions.{call['function']['name']}:{number}"
            )
        if self._takes_argument_texts:
            messages = _replace_arguments(
                messages, lambda value: value if isinstance(value, str) else _to_json(value)
            )
        errors = list[ChatTemplateError]()
        for form in self._iterate_forms(messages):
            try:
                return self._render(form, tools, variables, opens_reply)
            except ChatTemplateError as error:
                errors.append(error)
        raise errors[0]

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the ranges of its `{% generation %}` blocks."""
        mark = secrets.token_hex(16)
        variables = {_GENERATION_MARK: mark}
        text = self.render_prompt(messages, tools=tools, variables=variables, opens_reply=False)
        parts = text.split(mark)
        ends = [*itertools.accumulate(map(len, parts))]
        return "".join(parts), [*zip(ends[0::2], ends[1::2], strict=False)]

    def _iterate_forms(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        yield messages
        yield (shortened := _rename_calls(messages, _shorten_id))
        if not self._takes_argument_texts:
            for form in (messages, shortened):
                yield _replace_arguments(form, _make_arguments_object)

    @cached_property
    def _takes_argument_texts(self) -> bool:
        """Whether the template needs arguments as text, as DeepSeek's does.

        With an object such a template raises an error or prints Python's form of it.
        """

        def render_with(arguments: Any) -> str:
            probe = _replace_arguments(_TOOL_CONVERSATION, lambda _: arguments)
            try:
                return self._render(probe, None, None, True)
            except ChatTemplateError:
                return ""

        objects, texts = render_with({"probe": True}), render_with('{"probe": true}')
        return bool(texts) and (not objects or "{'probe': True}" in objects)

    def require_messages(self, *, with_tools: bool) -> None:
        """Raise RecipeError if the template omits a user's text or, `with_tools`, tool results."""
        messages = _TOOL_CONVERSATION if with_tools else _TOOL_CONVERSATION[:1]
        try:
            text = self.render_prompt(messages)
            lost = [message["role"] for message in messages if message["content"] not in text]
            problem = f"leaves out messages of role {lost[0]}" if lost else ""
        except ChatTemplateError as error:
            problem = f"refuses a conversation with a {messages[-1]['role']}: {error}"
        if problem:
            hint = "give chat_template.jinja of a model of texts"
            if with_tools:
                hint += " and tools, or set no inference.tool_call_parser"
            raise RecipeError(f"the model's chat template {problem}", key="model", hint=hint)

    @cached_property
    def changing_turn_end(self) -> tuple[str, str]:
        """End of a reply that ends a conversation, and of one within it, by gpt-oss' template.

        Two empty texts for other templates, whose ends are equal.
        """
        turn, mark = _TOOL_CONVERSATION[0], "the reply"
        reply: Message = {"role": "assistant", "content": mark}
        try:
            prompt = self.render_prompt([turn], opens_reply=False)
            opening = self.render_prompt([turn]).removeprefix(prompt)
            last = self.render_prompt([turn, reply], opens_reply=False).rpartition(mark)[2]
            within = self.render_prompt([turn, reply]).rpartition(mark)[2].removesuffix(opening)
        except ChatTemplateError:
            return "", ""
        is_appended = len(opening) < len(prompt + opening) == len(self.render_prompt([turn]))
        return (last, within) if is_appended and last != within else ("", "")

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        opens_reply: bool,
    ) -> str:
        values = {
            **self._globals,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": opens_reply,
        }
        try:
            # As `Template.render` does, without its lookup of every name in a chain of maps.
            context = self._template.new_context(values, shared=True)
            return "".join(self._template.root_render_func(context))
        except Exception as error:  # boundary: the template is the model author's code
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def _rename_calls(
    messages: Sequence[Message], rename: Callable[[dict[str, Any], int], str]
) -> list[Message]:
    numbers, new_id_by_id, renamed = itertools.count(), dict[str, str](), list[Message]()
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": rename(call, next(numbers))} for call in calls]
            pairs = zip(message["tool_calls"], calls, strict=True)
            new_id_by_id |= {old["id"]: new["id"] for old, new in pairs if "id" in old}
            message = {**message, "tool_calls": calls}
        elif "tool_call_id" in message:
            call_id = message["tool_call_id"]
            new_id = new_id_by_id.get(call_id) or _shorten_id({"id": call_id})
            message = {**message, "tool_call_id": new_id}
        renamed.append(message)
    return renamed


def _shorten_id(call: Mapping[str, Any], number: int = 0) -> str:
    return hashlib.blake2b((call.get("id") or "").encode(), digest_size=5).hexdigest()[:9]


def _replace_arguments(messages: Sequence[Message], replace: Callable[[Any], Any]) -> list[Message]:
    def rewrite(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": replace(function.get("arguments"))}}

    return [
        {**message, "tool_calls": list(map(rewrite, calls))}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def _make_arguments_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    return {"arguments": arguments} if arguments else {}


class TokenEncoder:
    """Encoder and decoder of one model's token ids. It recognizes special tokens, but adds none."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._words = CachedAsciiBPEEncoder.from_tokenizer(tokenizer)
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        """Rows of the model's embedding: every id sent to the engine must be smaller."""

    @classmethod
    def from_model_dir(cls, model_dir: Path) -> TokenEncoder:
        """Read the tokenizer of a model in Hugging Face format; RecipeError without a valid one."""
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise RecipeError(f"{model_dir} has no tokenizer.json", hint="save a fast tokenizer")
        config = read_json(model_dir / "config.json")
        text_config = config.get("text_config", config)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # boundary: the Rust side raises bare Exception
            raise RecipeError(f"{path} is damaged: {error}", hint="copy the model again") from error
        return cls(tokenizer, text_config.get("vocab_size"))

    def get_base_vocab_ids_by_token(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=False))

    def find_token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def list_special_token_ids(self) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted(number for number, token in added.items() if token.special)

    def list_plain_text_token_ids(self) -> list[int]:
        ids = {*self._tokenizer.get_vocab(with_added_tokens=False).values()}
        return sorted(ids.difference(self.list_special_token_ids()))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`, without those that the tokenizer adds around it."""
        if self._words is not None and text.isascii() and not add_special_tokens:
            return self._words.encode(text)
        # The batch call releases the GIL; the single call blocks every other thread.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded[0].ids

    def is_slow_to_encode(self, text: str) -> bool:
        uses_words = self._words is not None and text.isascii()
        return len(text) > (WORD_ENCODER_CHARS_IN_2_MS if uses_words else TOKENIZER_CHARS_IN_2_MS)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty one without a file."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
