"""Parameters of requests that are not used: accepted without effect, or refused by name.

Clients add fields with every release. Most are hints to a provider: how hard to think, what to
cache, which tier to bill. A hint changes neither the sampling nor the reply. So any value of it is
accepted and counted: of hints that a dialect declares, as a field of type `IgnoredParam`, and of
unknown ones. (Such fields in messages and items are not counted: SDKs copy them from replies.)

A parameter that would change the reply and cannot be honored is refused, with a way out: names in
the class attribute `refused` of a request, sampling parameters of other engines, and names that
resemble a used parameter. A value that requests nothing is never refused; null counts as absent.

Schemas and the arguments of tools are the client's own data and are not checked.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, inspect

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.metrics import MAX_NAME_CHARS
from areal_hpc.wire.decoding import decode_json

MAX_REWRITTEN_OBJECTS = 12_500
"""Limit per request. Each object takes about 12 microseconds, an item of a list half of that."""
MAX_UNKNOWN_PARAMS = 100
"""Different unknown parameters of a request, each of which is logged and counted."""
_MAX_HARMLESS_BYTES = 16
_MIN_SIMILARITY_TO_REFUSE = 0.85
_INDEX_PATTERN = re.compile(r"\[\d+\]")
get_type_info = cache(inspect.type_info)

IgnoredParam = Annotated[Any, Meta(description="Accepted without effect.", extra={"hint": True})]
"""Type of a hint: any value, or None if it is absent."""


def list_ignored_params(request: Struct, prefix: str = "") -> Iterator[str]:
    """Yield the names of the hints in a request, or in the object in it named by `prefix`."""
    for name, encode_name, is_hint in _list_hint_fields(type(request)):
        value = getattr(request, name)
        if value is None:
            continue
        if isinstance(value, Struct):
            yield from list_ignored_params(value, f"{prefix}{encode_name}.")
        elif is_hint:
            yield prefix + encode_name


@cache
def _list_hint_fields(struct_type: type[Struct]) -> list[tuple[str, str, bool]]:
    declared = inspect.type_info(struct_type)
    assert isinstance(declared, inspect.StructType)
    fields = [(field, is_ignored_param(field.type)) for field in declared.fields]
    return [
        (field.name, field.encode_name, is_hint)
        for field, is_hint in fields
        if is_hint or list_struct_types(field.type)
    ]


def is_ignored_param(field_type: inspect.Type) -> bool:
    return isinstance(field_type, inspect.Metadata) and bool((field_type.extra or {}).get("hint"))


EMPTY_VALUES: tuple[Any, ...] = (False, 0, "", [], {})
EMPTY_VALUES_OR_ONE = (*EMPTY_VALUES, 1)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a parameter, with the way out for its client."""

    way_out: str
    harmless: tuple[Any, ...] = EMPTY_VALUES
    """Values that are accepted because they request nothing, or the standard behavior."""


_BY_ENGINE = "the engine samples by temperature, top_p, top_k, min_p and penalties"
_NO_SEARCH = "replies are sampled, never searched for"
_ONE_TOKENIZATION = "text is tokenized and read back in one way; what clients show of it is theirs"
_OWN_WEIGHTS = "the cell serves the weights that are trained, and no others"
_OTHER_FORMAT = "use the format of a reply's text that this API has"
_REFUSED_NAMES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("best_of", "rank the replies to several requests yourself", EMPTY_VALUES_OR_ONE),
    ("num_beams length_penalty", _NO_SEARCH, EMPTY_VALUES_OR_ONE),
    ("use_beam_search early_stopping", _NO_SEARCH, EMPTY_VALUES),
    ("do_sample", "temperature 0 is greedy", (True,)),
    ("typical_p tfs_z", _BY_ENGINE, EMPTY_VALUES_OR_ONE),
    ("top_a mirostat dry_multiplier xtc_probability vllm_xargs", _BY_ENGINE, EMPTY_VALUES),
    ("no_repeat_ngram_size", "use frequency_penalty of Chat Completions", EMPTY_VALUES),
    ("bad_words bad_words_ids", "use logit_bias of Chat Completions", EMPTY_VALUES),
    (
        "logits_processors custom_logit_processor",
        "use logit_bias of Chat Completions",
        EMPTY_VALUES,
    ),
    ("allowed_token_ids", "use regex or ebnf of Chat Completions", EMPTY_VALUES),
    ("min_tokens min_new_tokens", "use min_tokens of Chat Completions", EMPTY_VALUES),
    ("ignore_eos", "use ignore_eos of Chat Completions", EMPTY_VALUES),
    ("guided_json structured_outputs json_schema", _OTHER_FORMAT, EMPTY_VALUES),
    ("guided_regex", "use regex of Chat Completions", EMPTY_VALUES),
    ("guided_choice", "use guided_choice of Chat Completions", EMPTY_VALUES),
    ("guided_grammar grammar", "use ebnf of Chat Completions", EMPTY_VALUES),
    ("structural_tag", "offer tools; their calls are held to their schemas", EMPTY_VALUES),
    ("lora_path adapter", _OWN_WEIGHTS, EMPTY_VALUES),
    ("stop_regex", "use stop strings", EMPTY_VALUES),
    ("include_stop_str_in_output no_stop_trim", _ONE_TOKENIZATION, EMPTY_VALUES),
    ("skip_special_tokens spaces_between_special_tokens", _ONE_TOKENIZATION, (True,)),
    (
        "truncate_prompt_tokens",
        "nothing is ever cut from a prompt: shorten it",
        (*EMPTY_VALUES, -1),
    ),
    ("prompt_logprobs", "log-probabilities are those of replies", EMPTY_VALUES),
)
"""Sampling parameters of other engines and providers: names, way out, harmless values."""
REFUSED_SAMPLING_OF_OTHER_ENGINES: Mapping[str, Refusal] = {
    name: Refusal(way_out, harmless)
    for names, way_out, harmless in _REFUSED_NAMES
    for name in names.split()
}


def keep_declared_members(
    body: bytes, request_type: Any, parent_key: str, unknown_params: list[str] | None
) -> bytes:
    """Remove members that are null or undeclared from JSON, and from declared objects in it.

    SDKs write null for parameters without a value, whether or not the server has them. The names of
    other removed members are added to `unknown_params`, as `tools[].defer_loading`; if that is
    None, such members are refused unless their value requests nothing. A name in snake case becomes
    the declared one in camel case, because Google's SDKs mix both. An object that decodes as it is
    stays unchanged as a whole.
    """
    rewriter = _DeclaredMembers(unknown_params)
    rewritten = rewriter.rewrite_value(body, (get_type_info(request_type),), parent_key)
    if unknown_params is not None:
        unknown_params[:] = rewriter.unknown
    return rewritten


class _DeclaredMembers:
    def __init__(self, unknown_params: list[str] | None) -> None:
        self.unknown = dict.fromkeys(unknown_params or ())
        self._leaves_out = unknown_params is not None
        self._objects_left = float(MAX_REWRITTEN_OBJECTS)

    def rewrite_value(
        self, raw_json: bytes, declared_types: Sequence[inspect.Type], key: str
    ) -> bytes:
        structs = list_struct_types(*declared_types)
        unwrapped = _unwrap_types(declared_types)
        items = [form.item_type for form in unwrapped if isinstance(form, inspect.ListType)]
        raw_json = raw_json.lstrip()
        if structs and raw_json[:1] == b"{":
            self._count(1, key)
            types: dict[str, list[inspect.Type]] = {}
            for field in _list_fields(structs):
                types.setdefault(field.encode_name, []).append(field.type)
            members = self._keep_members(raw_json, structs, key)
            for name, value in members.items():
                if name in types:
                    path = f"{key}.{name}" if key else name
                    members[name] = self._rewrite_within(value, types[name], path)
            return msgspec.json.encode(members)
        if items and raw_json[:1] == b"[":
            values = decode_json(raw_json, list[msgspec.Raw])
            self._count(len(values) / 2, key)
            return msgspec.json.encode(
                [self._rewrite_within(raw, items, f"{key}[{i}]") for i, raw in enumerate(values)]
            )
        return raw_json

    def _count(self, objects: float, key: str) -> None:
        self._objects_left -= objects
        if self._objects_left < 0:
            problem = f"more than {MAX_REWRITTEN_OBJECTS} objects are not as this API has them"
            raise ProxyRequestError(400, problem, key=key)

    def _rewrite_within(
        self, value: msgspec.Raw, declared_types: Sequence[inspect.Type], key: str
    ) -> msgspec.Raw:
        if any(_can_be_read(value, struct.cls) for struct in list_struct_types(*declared_types)):
            return value
        return msgspec.Raw(self.rewrite_value(bytes(value), declared_types, key))

    def _keep_members(
        self, raw_json: bytes, structs: list[inspect.StructType], key: str
    ) -> dict[str, msgspec.Raw]:
        encode_names = {field.name: field.encode_name for field in _list_fields(structs)}
        declared = {*encode_names.values(), *(s.tag_field for s in structs if s.tag_field)}
        is_closed = all(struct.forbid_unknown_fields for struct in structs)
        kept: dict[str, msgspec.Raw] = {}
        for original, value in decode_json(raw_json, dict[str, msgspec.Raw]).items():
            name = encode_names.get(original, original)
            path = (f"{key}.{name}" if key else name)[:MAX_NAME_CHARS]
            if bytes(value) == b"null":
                continue
            if name in kept:
                problem = f"{name} is given twice, in two spellings"
                raise ProxyRequestError(400, problem, key=path)
            if name in declared or not is_closed:
                kept[name] = value
            elif not any(getattr(struct.cls, "drops_unknown", False) for struct in structs):
                self._leave_out(name, path, bytes(value), structs)
        return kept

    def _leave_out(
        self, name: str, path: str, value: bytes, structs: list[inspect.StructType]
    ) -> None:
        if not _is_worth_counting(name, path, value, structs):
            return
        if not self._leaves_out:
            problem = f"the parameter {name[:MAX_NAME_CHARS]!r} is not supported"
            raise ProxyRequestError(400, problem, key=path)
        self.unknown[_INDEX_PATTERN.sub("[]", path)] = None
        if len(self.unknown) > MAX_UNKNOWN_PARAMS:
            problem = f"more than {MAX_UNKNOWN_PARAMS} parameters are not supported"
            raise ProxyRequestError(400, problem, key=path)


def _is_worth_counting(
    member_name: str, key: str, raw_value: bytes, structs: list[inspect.StructType]
) -> bool:
    """Refuse a member that would change the reply; return False for one that requests nothing."""
    if len(member_name) > MAX_NAME_CHARS:
        return True
    problem = f"the parameter {member_name!r} is not supported"
    for struct in structs:
        own: Mapping[str, Refusal] = getattr(struct.cls, "refused", {})
        refusal = own.get(member_name) or REFUSED_SAMPLING_OF_OTHER_ENGINES.get(member_name)
        if refusal is None:
            continue
        is_short = len(raw_value) <= _MAX_HARMLESS_BYTES
        if is_short and msgspec.json.decode(raw_value) in (None, *refusal.harmless):
            return False
        raise ProxyRequestError(
            400, f"{problem}, and would change the reply", key=key, hint=refusal.way_out
        )
    used = {
        field.encode_name for field in _list_fields(structs) if not is_ignored_param(field.type)
    }
    matches = difflib.get_close_matches(
        member_name, sorted(used), n=1, cutoff=_MIN_SIMILARITY_TO_REFUSE
    )
    if matches:
        raise ProxyRequestError(400, f"{problem}; did you mean {matches[0]!r}?", key=key)
    return True


def _list_fields(structs: Sequence[inspect.StructType]) -> list[inspect.Field]:
    return [field for struct in structs for field in struct.fields]


def _can_be_read(raw_json: msgspec.Raw, struct: type[msgspec.Struct]) -> bool:
    try:
        decode_json(raw_json, struct)
    except msgspec.ValidationError:
        return False
    return True


def list_struct_types(*types: inspect.Type) -> list[inspect.StructType]:
    return [form for form in _unwrap_types(types) if isinstance(form, inspect.StructType)]


def _unwrap_types(types: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    for form in types:
        if isinstance(form, inspect.Metadata):
            yield from _unwrap_types((form.type,))
        elif isinstance(form, inspect.UnionType):
            yield from _unwrap_types(form.types)
        else:
            yield form
