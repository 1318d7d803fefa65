"""Parameters that a request has besides those that are used: without effect, or refused by name.

Clients add fields with every release. Most are hints to a provider: how hard to think, what to
cache, which tier to bill. A hint changes neither how the model samples nor what is said, so it is
accepted whatever its value, and counted: one that a dialect declares, as a field of type
`IgnoredParam`, and one that it does not know. (Such fields in messages and items are what SDKs hand
back of a reply; they are not counted.)

What would change the reply and cannot be honored is refused, with a way out: names in a request's
class attribute `refused`, names by which other engines sample, and what looks like a parameter that
is used. A value that asks for nothing is never refused, and null stands for absence.

Schemas and the arguments of tools are a client's own data: nothing in them is looked at.
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
"""In one request. Each takes the loop about 12 microseconds; an item of a list half of that."""
MAX_UNKNOWN_PARAMS = 100
"""Different ones in a request: it is told of each, and each is counted."""
_MAX_HARMLESS_BYTES = 16
_MIN_SIMILARITY_TO_REFUSE = 0.85
_INDEX_PATTERN = re.compile(r"\[\d+\]")
get_type_info = cache(inspect.type_info)

IgnoredParam = Annotated[Any, Meta(description="Accepted without effect.", extra={"hint": True})]
"""Any value, and None when it is not given."""


def list_ignored_params(request: Struct, prefix: str = "") -> Iterator[str]:
    """Names of the hints in a request, or in the object within it that stands under `prefix`."""
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
    fields = [(one, is_ignored_param(one.type)) for one in declared.fields]
    return [
        (one.name, one.encode_name, is_hint)
        for one, is_hint in fields
        if is_hint or list_struct_types(one.type)
    ]


def is_ignored_param(field_type: inspect.Type) -> bool:
    return isinstance(field_type, inspect.Metadata) and bool((field_type.extra or {}).get("hint"))


EMPTY_VALUES: tuple[Any, ...] = (False, 0, "", [], {})
EMPTY_VALUES_OR_ONE = (*EMPTY_VALUES, 1)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a parameter is refused, as the way out of it."""

    way_out: str
    harmless: tuple[Any, ...] = EMPTY_VALUES
    """Values that ask for nothing, or for what is done anyway."""


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
"""How other engines and providers sample: names, way out, harmless values."""
REFUSED_SAMPLING_OF_OTHER_ENGINES: Mapping[str, Refusal] = {
    name: Refusal(way_out, harmless)
    for names, way_out, harmless in _REFUSED_NAMES
    for name in names.split()
}


def keep_declared_members(
    body: bytes, request_type: Any, parent_key: str, unknown_params: list[str] | None
) -> bytes:
    """JSON without the members that are null or not declared, down to declared objects in it.

    SDKs write null for what they do not ask for, whether or not the server knows the name. The
    names of what else was left out are added to `unknown_params`, as `tools[].defer_loading`; where
    that is None, only what asks for nothing is left out. A name in snake case becomes the one in
    camel case that is declared, since Google's SDKs mix both. An object that can be read as it is
    stays unchanged, with all within it.
    """
    walk = _DeclaredMembers(unknown_params)
    rewritten = walk.rewrite_value(body, (get_type_info(request_type),), parent_key)
    if unknown_params is not None:
        unknown_params[:] = walk.unknown
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
        lists = [one for one in _unwrap_types(declared_types) if isinstance(one, inspect.ListType)]
        items = [one.item_type for one in lists]
        raw_json = raw_json.lstrip()
        if structs and raw_json[:1] == b"{":
            self._count(1, key)
            types: dict[str, list[inspect.Type]] = {}
            for field in _list_fields(structs):
                types.setdefault(field.encode_name, []).append(field.type)
            members = self._keep_members(raw_json, structs, key)
            for name, value in members.items():
                if name in types:
                    below = f"{key}.{name}" if key else name
                    members[name] = self._rewrite_within(value, types[name], below)
            return msgspec.json.encode(members)
        if items and raw_json[:1] == b"[":
            listed = decode_json(raw_json, list[msgspec.Raw])
            self._count(len(listed) / 2, key)
            return msgspec.json.encode(
                [self._rewrite_within(one, items, f"{key}[{i}]") for i, one in enumerate(listed)]
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
        if any(_can_be_read(value, one.cls) for one in list_struct_types(*declared_types)):
            return value
        return msgspec.Raw(self.rewrite_value(bytes(value), declared_types, key))

    def _keep_members(
        self, raw_json: bytes, structs: list[inspect.StructType], key: str
    ) -> dict[str, msgspec.Raw]:
        encode_names = {field.name: field.encode_name for field in _list_fields(structs)}
        known = {*encode_names.values(), *(one.tag_field for one in structs if one.tag_field)}
        is_closed = all(struct.forbid_unknown_fields for struct in structs)
        kept: dict[str, msgspec.Raw] = {}
        for given, value in decode_json(raw_json, dict[str, msgspec.Raw]).items():
            name = encode_names.get(given, given)
            place = (f"{key}.{name}" if key else name)[:MAX_NAME_CHARS]
            if bytes(value) == b"null":
                continue
            if name in kept:
                problem = f"{name} is given twice, in two spellings"
                raise ProxyRequestError(400, problem, key=place)
            if name in known or not is_closed:
                kept[name] = value
            elif not any(getattr(one.cls, "drops_unknown", False) for one in structs):
                self._leave_out(name, place, bytes(value), structs)
        return kept

    def _leave_out(
        self, name: str, place: str, value: bytes, structs: list[inspect.StructType]
    ) -> None:
        if not _is_worth_counting(name, place, value, structs):
            return
        if not self._leaves_out:
            problem = f"the parameter {name[:MAX_NAME_CHARS]!r} is not supported"
            raise ProxyRequestError(400, problem, key=place)
        self.unknown[_INDEX_PATTERN.sub("[]", place)] = None
        if len(self.unknown) > MAX_UNKNOWN_PARAMS:
            problem = f"more than {MAX_UNKNOWN_PARAMS} parameters are not supported"
            raise ProxyRequestError(400, problem, key=place)


def _is_worth_counting(
    member_name: str, key: str, raw_value: bytes, structs: list[inspect.StructType]
) -> bool:
    """Raise for a member that would change the reply; false for one that asks for nothing."""
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
    used = {one.encode_name for one in _list_fields(structs) if not is_ignored_param(one.type)}
    near = difflib.get_close_matches(
        member_name, sorted(used), n=1, cutoff=_MIN_SIMILARITY_TO_REFUSE
    )
    if near:
        raise ProxyRequestError(400, f"{problem}; did you mean {near[0]!r}?", key=key)
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
    return [one for one in _unwrap_types(types) if isinstance(one, inspect.StructType)]


def _unwrap_types(types: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    for form in types:
        if isinstance(form, inspect.Metadata):
            yield from _unwrap_types((form.type,))
        elif isinstance(form, inspect.UnionType):
            yield from _unwrap_types(form.types)
        else:
            yield form
