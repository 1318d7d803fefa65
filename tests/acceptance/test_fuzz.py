"""Whatever is sent to the proxy, and in whatever order: no failure of its own, nothing lost.

Schemathesis makes requests from the proxy's own description, right ones and wrong ones; a
hypothesis state machine plays sessions. Counts go to `benchmarks/results/fuzz.json`.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.acceptance.session_machine import Sessions
from tests.support.mutated_calls import CONTENTS, GOOGLE
from tests.support.proxy_stage import Stage
from tests.support.results import add_results
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:schemathesis"),
]

REQUESTS_A_ROUTE = 40
"""Of each kind: as described, sound, and wrong."""
SESSION_PLAYS = 400
STEPS_A_PLAY = 40
ASKED = [{"role": "user", "content": "hello"}]
SOUND: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASKED},
    "/completions": {"prompt": "hello"},
    "/messages": {"messages": ASKED},
    "/messages/count_tokens": {"messages": ASKED},
    "/responses": {"input": "hello"},
    **{f"/v1beta/models/{{model}}:{verb}": {"contents": CONTENTS} for verb in GOOGLE},
    "/rl/set_reward": {"reward": 1.0},
    "/rl/start_session": {"task_id": "try"},
    "/rl/offer_episode": {"session": {"task_id": "try"}, "task": {}, "wait_s": 0.01},
    "/rl/await_session": {"session_id": "none", "wait_s": 0.01},
}
"""What makes a request a sound one, whatever else it has."""
LONG_POLLS = ("/rl/offer_episode", "/rl/await_session")
"""Routes that keep a request as long as it says."""
HANG_S = 10.0
"""A request that takes longer counts as one that hangs: the scripted model needs milliseconds."""
CHECKS = [
    *(content_type_conformance, response_schema_conformance),
    *(status_code_conformance, negative_data_rejection),
]
QUIET = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    limits = {"max_request_bytes": 1_000_000, "request_timeout_s": HANG_S}
    with closing(Stage(tmp_path_factory.mktemp("fuzz"), proxy=limits)) as stage:
        stage.http.timeout = httpx.Timeout(HANG_S)
        yield stage


def operations(stage: Stage) -> Iterator[Any]:
    document = stage.http.get(f"{stage.url}/openapi.json").json()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if not operation.path.startswith(("/v1/", "/v1alpha/")):  # the same code answers all
            yield operation


def test_no_request_breaks_the_proxy(stage: Stage) -> None:
    began = time.monotonic()
    routes = {one.path: fuzz(stage, one) for one in operations(stage)}
    total = sum((Counter(counts) for counts in routes.values()), Counter())
    assert total["200"] > 500
    assert total.total() - total["200"] > 500
    seconds = round(time.monotonic() - began, 1)
    add_results("fuzz", requests={"by_status": total, "by_route": routes, "seconds": seconds})
    assert stage.http.get(f"{stage.url}/healthz").json()["requests_in_flight"] == 0


def fuzz(stage: Stage, operation: Any) -> dict[str, int]:
    """Send to one route what its description allows, sound requests with a part of that, and
    what it does not allow."""
    counts: Counter[str] = Counter()
    sound = SOUND.get(operation.path, {})
    opened_by = operation.definition.raw["x-opened-by"]

    def send(case: Any) -> None:
        is_driver = opened_by in ("admin", "driver")
        key = stage.driver_key if is_driver else key_for(stage, case.path)
        headers = {"authorization": f"Bearer {key}"}
        answer = case.call(base_url=stage.url, headers=headers, timeout=HANG_S)
        assert answer.status_code < 500, (case.path, case.body, answer.text)
        case.validate_response(answer, checks=CHECKS, headers=headers)
        counts[str(answer.status_code)] += 1

    def send_allowed(case: Any) -> None:
        if operation.path in LONG_POLLS:
            case.body["wait_s"] = 0.01
        send(case)

    allowed: st.SearchStrategy[Any]
    allowed = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    examples = settings(QUIET, max_examples=REQUESTS_A_ROUTE)
    examples(given(allowed)(send_allowed))()
    if not operation.body:
        return dict(counts)
    wrong: st.SearchStrategy[Any]
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    examples(given(wrong)(send))()

    def send_sound(case: Any, kept: list[int]) -> None:
        given_fields = sorted(case.body.items())
        some = [given_fields[i % len(given_fields)] for i in kept if given_fields]
        case.body = {**dict(some), **sound}
        send(case)

    kept = st.lists(st.integers(0, 99), max_size=2)
    examples(given(allowed, kept)(send_sound))()
    return dict(counts)


def key_for(stage: Stage, path: str) -> str:
    """The key of a new session, so that each request finds one open."""
    _, key = stage.open_session()
    if path == "/rl/set_reward":
        assert stage.ask(key, "hello").status_code == 200
    return key


def test_no_order_of_calls_loses_a_reward(stage: Stage) -> None:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    plays = settings(QUIET, max_examples=SESSION_PLAYS, stateful_step_count=STEPS_A_PLAY)
    run_state_machine_as_test(
        lambda: Sessions(stage, counts),  # type: ignore[arg-type]  # any factory will do
        settings=plays,
    )
    assert counts["rewards_exported"] > 100, counts
    health = f"{stage.url}/healthz"
    wait_for(lambda: not stage.http.get(health).json()["requests_in_flight"], HANG_S)
    add_results("fuzz", sessions={**counts, "seconds": round(time.monotonic() - began, 1)})
