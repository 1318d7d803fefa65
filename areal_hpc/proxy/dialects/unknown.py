"""Parameters that a dialect does not declare: without effect, unless they change what is said.

Clients add fields with every release. Most are hints to a provider, and refusing them would refuse
the client; so they are left out, counted and logged, as declared hints are. What would change how
the model samples, or what its reply means, is refused by its name, and so is what looks like a
parameter that is declared.
"""

import difflib
import re

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError

_OTHERS_SAMPLING = """
best_of num_beams use_beam_search length_penalty early_stopping do_sample no_repeat_ngram_size
bad_words bad_words_ids min_tokens min_new_tokens guided_json guided_regex guided_choice
guided_grammar structured_outputs structural_tag grammar json_schema typical_p top_a tfs_z mirostat
mirostat_eta mirostat_tau dry_multiplier dry_base xtc_probability xtc_threshold logits_processors
custom_logit_processor lora_path adapter ignore_eos stop_regex include_stop_str_in_output
no_stop_trim
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
allowed_token_ids vllm_xargs
"""
"""How other engines and providers sample, under names that are not honored here."""
_OTHERS_MEANING = """
functions function_call audio web_search_options background conversation prompt container echo
suffix mcp_servers max_tool_calls continue_final_message add_generation_prompt documents file_ids
attachments messages input system
"""
"""What a reply means, or who runs what it asks for."""
_MEANS_SOMETHING = frozenset((_OTHERS_SAMPLING + _OTHERS_MEANING).split())
"""Refused wherever a dialect does not declare them."""
_SIMILARITY = 0.85
_INDEX_PATTERN = re.compile(r"\[\d+\]")


def drop_unknown(body: bytes, form: type[msgspec.Struct], inside: str) -> tuple[bytes, list[str]]:
    """A JSON object without the members that are not declared, down to declared objects in it.

    Returns:
        The object, and the names of what was left out, as `tools[].defer_loading`.

    Raises:
        ProxyRequestError: 400: one of them means something, or looks like one that is declared.
    """
    names: list[str] = []
    return _drop(body, inspect.type_info(form), inside, names), names


def _drop(raw: bytes, form: inspect.Type, inside: str, names: list[str]) -> bytes:
    structs = [*_list_structs(form)]
    if not structs or raw.lstrip()[:1] != b"{":
        return raw
    members = {field.encode_name: field for struct in structs for field in struct.fields}
    tags = {struct.tag_field for struct in structs}
    is_closed = all(struct.forbid_unknown_fields for struct in structs)
    kept: dict[str, msgspec.Raw] = {}
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        place = f"{inside}.{name}" if inside else name
        if name in members:
            kept[name] = msgspec.Raw(_drop(bytes(value), members[name].type, place, names))
        elif name in tags or not is_closed:
            kept[name] = value
        elif bytes(value) != b"null":
            _refuse_if_it_matters(name, place, {*members})
            names.append(_INDEX_PATTERN.sub("[]", place))
    return msgspec.json.encode(kept)


def _list_structs(form: inspect.Type) -> list[inspect.StructType]:
    """The objects that a value may be, out of unions and constraints."""
    if isinstance(form, inspect.Metadata):
        return _list_structs(form.type)
    if isinstance(form, inspect.UnionType):
        return [struct for one in form.types for struct in _list_structs(one)]
    return [form] if isinstance(form, inspect.StructType) else []


def _refuse_if_it_matters(name: str, place: str, declared: set[str]) -> None:
    problem = f"the parameter {name!r} is not supported"
    if name in _MEANS_SOMETHING:
        raise ProxyRequestError(400, f"{problem}, and would change the reply", key=place)
    near = difflib.get_close_matches(name, sorted(declared), n=1, cutoff=_SIMILARITY)
    if near:
        raise ProxyRequestError(400, f"{problem}; did you mean {near[0]!r}?", key=place)
