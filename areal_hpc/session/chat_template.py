"""Chat template rendering and tokenization without transformers."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
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

# The thread pool of the Rust encoder costs more than it saves on one text at a time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

TOKENIZER_CHARS_IN_2_MS = 8192
WORD_ENCODER_CHARS_IN_2_MS = 32768
"""What is encoded in about 2 ms, by the tokenizer and word by word."""
_THINKING_FIELD_PATTERN = re.compile(r"\bthinking\b")
_KIMI_MARK = "<|tool_call_argument_begin|>"
"""Stands behind the id of a call in templates of Kimi K2."""
Message = dict[str, Any]
"""One chat message in normal form (see `message_matching.normalize_chat_message`)."""


_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOL_CONVERSATION: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "the result of a tool", "tool_call_id": "call00001"},
]
"""What shows the habits of a template."""


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _JinjaSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that is quick about `message.role`.

    Jinja asks every object for an attribute before it looks for a key, and a message has none.
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
    """A model's chat template, rendered in a sandbox.

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
            self.variables = frozenset(
                meta.find_undeclared_variables(environment.parse(template_source))
            )
            """Names that the template reads from outside."""
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(
                f"the chat template does not parse: {error}",
                hint="fix chat_template in tokenizer_config.json or chat_template.jinja",
            ) from error

    @classmethod
    def from_model_dir(cls, model_dir: Path) -> ChatTemplate:
        """The template of a model in Hugging Face format; RecipeError if it has no good one."""
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
        """The text the model reads, which ends with the opening of the assistant's turn.

        Messages are in normal form; `variables` are a request's `chat_template_kwargs`. Without
        `opens_reply` the text ends with the last message.
        """
        if self._reads_thinking:
            messages = [
                {**one, "thinking": thought} if (thought := one.get("reasoning_content")) else one
                for one in messages
            ]
        for one in messages:  # `any` takes twice as long
            if "tool_calls" in one:
                break
        else:
            return self._render(messages, tools, variables, opens_reply)
        if self._numbers_calls:
            messages = _rename_calls(
                messages, lambda call, number: f"functions.{call['function']['name']}:{number}"
            )
        if self._takes_argument_texts:
            messages = _replace_arguments(
                messages, lambda given: given if isinstance(given, str) else _to_json(given)
            )
        refusals = list[ChatTemplateError]()
        for form in self._iterate_forms(messages):
            try:
                return self._render(form, tools, variables, opens_reply)
            except ChatTemplateError as error:
                refusals.append(error)
        raise refusals[0]

    def _iterate_forms(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        yield messages
        yield (shortened := _rename_calls(messages, _shorten_id))
        if not self._takes_argument_texts:
            for form in (messages, shortened):
                yield _replace_arguments(form, _make_arguments_object)

    @cached_property
    def _takes_argument_texts(self) -> bool:
        """True of a template that joins arguments to its text, as DeepSeek's.

        It raises if they are an object, or shows how Python writes one.
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
        """Demand that the model reads what users say and, `with_tools`, what tools give back."""
        said = _TOOL_CONVERSATION if with_tools else _TOOL_CONVERSATION[:1]
        try:
            text = self.render_prompt(said)
            lost = [one["role"] for one in said if one["content"] not in text]
            problem = f"leaves out what a {lost[0]} says" if lost else ""
        except ChatTemplateError as error:
            problem = f"refuses a conversation with a {said[-1]['role']}: {error}"
        if problem:
            hint = "give chat_template.jinja of a model of texts"
            if with_tools:
                hint += " and tools, or set no inference.tool_call_parser"
            raise RecipeError(f"the model's chat template {problem}", key="model", hint=hint)

    @cached_property
    def changing_turn_end(self) -> tuple[str, str]:
        """How a turn ends a conversation and how it ends within one, of gpt-oss' template.

        Empty of others, where the two are the same.
        """
        turn, mark = _TOOL_CONVERSATION[0], "the reply"
        reply: Message = {"role": "assistant", "content": mark}
        try:
            asked = self.render_prompt([turn], opens_reply=False)
            opening = self.render_prompt([turn]).removeprefix(asked)
            last = self.render_prompt([turn, reply], opens_reply=False).rpartition(mark)[2]
            within = self.render_prompt([turn, reply]).rpartition(mark)[2].removesuffix(opening)
        except ChatTemplateError:
            return "", ""
        is_appended = len(opening) < len(asked + opening) == len(self.render_prompt([turn]))
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
            # What `Template.render` does, without looking every name up in a chain of maps.
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
            calls = [{**one, "id": rename(one, next(numbers))} for one in calls]
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
        {**one, "tool_calls": list(map(rewrite, calls))}
        if (calls := one.get("tool_calls"))
        else one
        for one in messages
    ]


def _make_arguments_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    return {"arguments": arguments} if arguments else {}


class TokenEncoder:
    """Text <-> token ids of one model. Special tokens in a text are recognized, none are added."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._words = CachedAsciiBPEEncoder.from_tokenizer(tokenizer)
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        """Rows of the model's embedding: every id sent to the engine must be below it."""

    @classmethod
    def from_model_dir(cls, model_dir: Path) -> TokenEncoder:
        """The tokenizer of a model in Hugging Face format; RecipeError if it has no good one."""
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
        known = {*self._tokenizer.get_vocab(with_added_tokens=False).values()}
        return sorted(known.difference(self.list_special_token_ids()))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; the tokens a tokenizer adds around it only when asked for."""
        if self._words is not None and text.isascii() and not add_special_tokens:
            return self._words.encode(text)
        # The batch call releases the GIL; the single call stalls every other thread.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded[0].ids

    def is_slow_to_encode(self, text: str) -> bool:
        by_words = self._words is not None and text.isascii()
        return len(text) > (WORD_ENCODER_CHARS_IN_2_MS if by_words else TOKENIZER_CHARS_IN_2_MS)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded
