"""Grammars, stops and biases without end are refused by name; what agents use is not."""

from typing import Any

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.grammar_limits import MAX_CHARS_BY_KIND, refuse_costly_sampling


@pytest.mark.parametrize("kind", MAX_CHARS_BY_KIND)
def test_long_grammars_are_refused(kind: str) -> None:
    grammar: dict[str, Any] = {kind: "a" * MAX_CHARS_BY_KIND[kind]}
    refuse_costly_sampling(SamplingParams(1.0, 16, **grammar))
    with pytest.raises(ProxyRequestError, match="characters") as refused:
        refuse_costly_sampling(SamplingParams(1.0, 16, **{kind: grammar[kind] + "a"}))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop", ["a"] * 129),
        ("stop", ["a" * 1025]),
        ("stop_token_ids", [5] * 1025),
        ("logit_bias", {str(token): 1.0 for token in range(16_385)}),
    ],
)
def test_lists_without_end_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ProxyRequestError, match=f"{key} is too large") as refused:
        refuse_costly_sampling(SamplingParams(1.0, 16, **{key: value}))
    assert refused.value.param == key
