"""Parameters that are refused by name: they would change what is said, and cannot be honored.

A dialect's request declares what is used and what is a hint, and names in its class attribute
`refused` what it refuses, each with a way out; names that other engines use for sampling are
refused in every dialect. A value that asks for nothing is never refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

EMPTY_VALUES: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that ask for nothing under most names."""
EMPTY_VALUES_OR_ONE = (*EMPTY_VALUES, 1)


@dataclass(frozen=True, slots=True)
class RefusedParamRule:
    """Why a parameter is refused, as the way out of it."""

    way_out: str
    harmless: tuple[Any, ...] = EMPTY_VALUES
    """Values that ask for nothing, or for what is done anyway. So does null."""

    def is_harmless_value(self, value: Any) -> bool:
        return value is None or any(value == one for one in self.harmless)


_ENGINE_SAMPLING_HINT = "the engine samples by temperature, top_p, top_k, min_p and penalties"
_NO_BEAM_SEARCH_HINT = "replies are sampled, never searched for"
_FIXED_TOKENIZATION_HINT = (
    "text is tokenized and read back in one way; what clients show of it is theirs"
)
REFUSED_SAMPLING_OF_OTHER_ENGINES: Mapping[str, RefusedParamRule] = {
    "best_of": RefusedParamRule(
        "rank the replies to several requests yourself", EMPTY_VALUES_OR_ONE
    ),
    "num_beams": RefusedParamRule(_NO_BEAM_SEARCH_HINT, EMPTY_VALUES_OR_ONE),
    "use_beam_search": RefusedParamRule(_NO_BEAM_SEARCH_HINT),
    "length_penalty": RefusedParamRule(_NO_BEAM_SEARCH_HINT, EMPTY_VALUES_OR_ONE),
    "early_stopping": RefusedParamRule(_NO_BEAM_SEARCH_HINT),
    "do_sample": RefusedParamRule("temperature 0 is greedy", (True,)),
    "no_repeat_ngram_size": RefusedParamRule("use frequency_penalty of Chat Completions"),
    "bad_words": RefusedParamRule("use logit_bias of Chat Completions"),
    "bad_words_ids": RefusedParamRule("use logit_bias of Chat Completions"),
    "allowed_token_ids": RefusedParamRule("use regex or ebnf of Chat Completions"),
    "min_tokens": RefusedParamRule("use min_tokens of Chat Completions"),
    "min_new_tokens": RefusedParamRule("use min_tokens of Chat Completions"),
    "guided_json": RefusedParamRule("use the format of a reply's text that this API has"),
    "guided_regex": RefusedParamRule("use regex of Chat Completions"),
    "guided_choice": RefusedParamRule("use guided_choice of Chat Completions"),
    "guided_grammar": RefusedParamRule("use ebnf of Chat Completions"),
    "structured_outputs": RefusedParamRule("use the format of a reply's text that this API has"),
    "structural_tag": RefusedParamRule("offer tools; their calls are held to their schemas"),
    "grammar": RefusedParamRule("use ebnf of Chat Completions"),
    "json_schema": RefusedParamRule("use the format of a reply's text that this API has"),
    "typical_p": RefusedParamRule(_ENGINE_SAMPLING_HINT, EMPTY_VALUES_OR_ONE),
    "top_a": RefusedParamRule(_ENGINE_SAMPLING_HINT),
    "tfs_z": RefusedParamRule(_ENGINE_SAMPLING_HINT, EMPTY_VALUES_OR_ONE),
    "mirostat": RefusedParamRule(_ENGINE_SAMPLING_HINT),
    "dry_multiplier": RefusedParamRule(_ENGINE_SAMPLING_HINT),
    "xtc_probability": RefusedParamRule(_ENGINE_SAMPLING_HINT),
    "logits_processors": RefusedParamRule("use logit_bias of Chat Completions"),
    "custom_logit_processor": RefusedParamRule("use logit_bias of Chat Completions"),
    "vllm_xargs": RefusedParamRule(_ENGINE_SAMPLING_HINT),
    "lora_path": RefusedParamRule("the cell serves the weights that are trained, and no others"),
    "adapter": RefusedParamRule("the cell serves the weights that are trained, and no others"),
    "ignore_eos": RefusedParamRule("use ignore_eos of Chat Completions"),
    "stop_regex": RefusedParamRule("use stop strings"),
    "include_stop_str_in_output": RefusedParamRule(_FIXED_TOKENIZATION_HINT),
    "no_stop_trim": RefusedParamRule(_FIXED_TOKENIZATION_HINT),
    "skip_special_tokens": RefusedParamRule(_FIXED_TOKENIZATION_HINT, (True,)),
    "spaces_between_special_tokens": RefusedParamRule(_FIXED_TOKENIZATION_HINT, (True,)),
    "truncate_prompt_tokens": RefusedParamRule(
        "nothing is ever cut from a prompt: shorten it", (*EMPTY_VALUES, -1)
    ),
    "prompt_logprobs": RefusedParamRule("log-probabilities are those of replies"),
}
"""How other engines and providers sample, under names that no dialect honors unless it says so."""


def find_refusal(param_name: str, object_type: type[msgspec.Struct]) -> RefusedParamRule | None:
    own: Mapping[str, RefusedParamRule] = getattr(object_type, "refused", {})
    return own.get(param_name) or REFUSED_SAMPLING_OF_OTHER_ENGINES.get(param_name)
