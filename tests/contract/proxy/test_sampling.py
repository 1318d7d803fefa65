"""What reaches the engine of the sampling parameters that a client gives, and what comes back."""

import json
from typing import Any

import httpx
import pytest

from tests.contract.proxy.talk import LEAST, QUESTION, ask_least, chunks_of, ignored
from tests.support.proxy_stage import Stage

SCHEMA = {"type": "object"}


@pytest.mark.parametrize("route", LEAST)
def test_a_session_may_hold_its_agent_to_the_recipes_sampling(stage: Stage, route: str) -> None:
    own: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    asked = {"temperature": 0, "top_p": 0.1} | ({} if route == "/responses" else {"top_k": 1})
    before, said = ignored(stage), {}
    for rule in ("agent", "recipe"):
        _, key = stage.open_session(sampling_from=rule, **own)
        said = ask_least(stage, key, route, **asked).json()
    by_agent, by_recipe = (request["sampling_params"] for request in stage.sglang.requests)
    assert {name: by_recipe[name] for name in own} == own
    assert {name: by_agent.get(name) for name in asked} == asked
    new = {name for where, name in ignored(stage) if where == route}
    assert {*asked} <= new
    assert sum(ignored(stage).values()) == sum(before.values()) + len(asked)
    if route == "/responses":
        assert (said["temperature"], said["top_p"]) == (0.7, 0.9)


def test_vllms_names_reach_the_engine_under_its_own(stage: Stage, key: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"min_tokens": 9, "max_tokens": 4}, {"min_new_tokens": 4}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"guided_json": SCHEMA}, {"json_schema": '{"type":"object"}'}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "[0-9]"}, {"regex": "[0-9]"}),
        ({"guided_choice": ["yes", 'a "no"']}, {"ebnf": 'root ::= "yes" | "a \\"no\\""'}),
        ({"structured_outputs": {"choice": ["a"]}}, {"ebnf": 'root ::= "a"'}),
        ({"guided_json": None, "guided_choice": []}, {}),
    ]
    for number, (asked, sent) in enumerate(cases):
        ask_least(stage, key, ("/chat/completions", "/completions")[number % 2], **asked)
        params = stage.sglang.requests[-1]["sampling_params"]
        names = {"json_schema", "regex", "ebnf", "min_new_tokens", "ignore_eos"}
        assert {name: params[name] for name in names & params.keys()} == sent, asked


def test_a_seed_of_64_bits_is_folded(stage: Stage, key: str) -> None:
    for seed, sent in ((7, 7), (-5, -5), (2**63 - 1, 2**30 - 1), (2**63 - 1, 2**30 - 1)):
        ask_least(stage, key, "/chat/completions", seed=seed)
        assert stage.sglang.requests.pop()["sampling_params"]["sampling_seed"] == sent


def test_a_temperature_that_is_greedy_to_the_engine_is_recorded_as_0(
    stage: Stage, key: str
) -> None:
    for asked, taken in ((1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6)):
        ask_least(stage, key, "/chat/completions", temperature=asked)
        assert stage.sglang.requests[-1]["sampling_params"]["temperature"] == taken
        interaction = stage.journaled(key)[-1]
        assert interaction.temperature == taken
        assert json.loads(interaction.sampling)["temperature"] == taken


@pytest.mark.parametrize("route", ["/chat/completions", "/completions"])
def test_token_ids_are_returned_when_they_are_asked_for(stage: Stage, route: str) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    body = dict(LEAST[route])

    def ids_of(answer: httpx.Response) -> dict[str, Any]:
        ends = [answer.json()] if not body.get("stream") else chunks_of(answer)
        choice = ends[-1]["choices"][0]
        return {name: choice.get(name) for name in ("prompt_token_ids", "token_ids")}

    for streams in (False, True):
        body |= {"return_token_ids": True, "stream": streams}
        found = ids_of(ask_least(stage, key, route, **body))
        prompt = stage.sglang.requests[-1]["input_ids"]
        assert found == {"prompt_token_ids": prompt, "token_ids": letters}
        if route == "/chat/completions":  # also of a prompt that goes on from recorded tokens
            said = [{"role": "assistant", "content": "hello"}, *QUESTION]
            body["messages"] = [*body["messages"], *said]
    del body["stream"]
    assert ids_of(ask_least(stage, key, route, stream=False)) == {
        "prompt_token_ids": None,
        "token_ids": None,
    }
