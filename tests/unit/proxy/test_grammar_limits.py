"""Grammars that would keep a replica busy for long are refused; those that agents use are not."""

import json
from typing import Any

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.grammar_limits import refuse_costly_sampling

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def double(levels: int) -> dict[str, Any]:
    """Refers twice to one that refers twice, and so on; the last one to the first."""
    definitions: dict[str, Any] = {"n0": {"anyOf": [{"$ref": f"#/$defs/n{levels}"}, {}]}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/n{level - 1}"}
        definitions[f"n{level}"] = {"type": "object", "properties": {"a": below, "b": below}}
    return {"$defs": definitions, "$ref": f"#/$defs/n{levels}"}


def strings(count: int) -> dict[str, Any]:
    fields = {f"p{index}": {"type": "string", "maxLength": 100} for index in range(count)}
    return {"type": "object", "properties": fields}


def optional_terms(count: int) -> str:
    return "root ::= " + " ".join(f'("{LETTERS[index % 26]}"?)' for index in range(count))


HEAVY: list[tuple[str, str, str]] = [
    ("ebnf", optional_terms(3000), "3000 terms are optional or repeated"),
    ("ebnf", optional_terms(101), "101 terms are optional or repeated"),
    ("regex", "(a)?" * 101, "101 terms are optional or repeated"),
    ("regex", "a" * 4097, "4097 characters"),
    ("regex", "[a-z]{0,5000}", "repeated 5000 times"),
    ("regex", "[a-z]{0,99999999999999999999}", "repeated 4097 times"),
    ("regex", "(([a-z]{1,100}){1,100}){1,100}", "repeated 10000 times"),
    ("regex", "(" * 70 + ")" * 70, "groups nest deeper than 64"),
    ("json_schema", json.dumps(nest(80)), "schemas nest deeper than 64"),
    ("json_schema", json.dumps(double(14)), "more than 10000 values, references replaced"),
    ("json_schema", json.dumps(double(60)), "schemas nest deeper than 64"),
    ("json_schema", json.dumps(strings(33)), "more than 32 strings have a length or a pattern"),
    ("json_schema", '{"pattern": "^([a-z]{0,8}){0,8}$"}', "repeated 64 times"),
    ("json_schema", "[" * 100_000, "cannot be read"),
    ("structural_tag", json.dumps({"format": {"tags": [nest(80)]}}), "deeper than 64"),
]
USUAL: list[tuple[str, str]] = [
    ("regex", r"(?:\d{4}-\d{2}-\d{2})(?:T\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"),
    ("regex", r"[?*+{}]" * 200 + r"\?\*\{5000\}"),
    ("regex", r"(yes|no|maybe)( [a-z]{1,20}){0,40}"),
    ("ebnf", "root ::= (" + " | ".join(f'"w?*{index}"' for index in range(1000)) + ")*"),
    ("ebnf", 'root ::= "{5000}" [?*+"] expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+'),
    ("json_schema", json.dumps(nest(30))),
    ("json_schema", json.dumps(double(5))),
    ("json_schema", json.dumps(strings(32))),
    ("json_schema", '{"properties": {"pattern": {"pattern": "^[A-Z]{3}-[0-9]{4,8}$"}}}'),
    ("json_schema", '{"enum": ["a{0,9999}", "%s"]}' % ("?" * 500)),
]


@pytest.mark.parametrize(("name", "text", "problem"), HEAVY, ids=range(len(HEAVY)))
@pytest.mark.timeout(60)
def test_heavy_grammars_are_refused_at_once(name: str, text: str, problem: str) -> None:
    grammar: dict[str, Any] = {name: text}
    with pytest.raises(ProxyRequestError, match=problem) as refused:
        refuse_costly_sampling(SamplingParams(1.0, 16, **grammar))
    assert refused.value.status == 400


@pytest.mark.parametrize(("name", "text"), USUAL, ids=range(len(USUAL)))
def test_usual_grammars_are_not(name: str, text: str) -> None:
    grammar: dict[str, Any] = {name: text}
    refuse_costly_sampling(SamplingParams(1.0, 16, **grammar))


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
