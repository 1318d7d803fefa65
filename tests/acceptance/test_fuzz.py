"""Whatever is sent to the proxy, and in whatever order: no failure of its own, nothing lost.

Schemathesis makes requests from the proxy's own description, right ones and wrong ones; a
hypothesis state machine plays sessions. Counts go to `benchmarks/results/fuzz.json`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.contract.proxy.proxy_stage import Stage
from tests.contract.proxy.scripted_sglang import Script

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:schemathesis"),
]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.json"
REQUESTS_A_ROUTE = 40
"""Of each kind: as described, sound, and wrong."""
SESSION_PLAYS = 400
STEPS_A_PLAY = 40
SESSIONS_A_PLAY = 3
ASKED = [{"role": "user", "content": "hello"}]
SOUND: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASKED},
    "/completions": {"prompt": "hello"},
    "/messages": {"messages": ASKED},
    "/messages/count_tokens": {"messages": ASKED},
    "/responses": {"input": "hello"},
    "/rl/set_reward": {"reward": 1.0},
    "/rl/start_session": {"task_id": "try"},
    "/rl/offer_session": {"session": {"task_id": "try"}, "task": {}, "wait_s": 0.01},
    "/rl/await_session": {"session_id": "none", "wait_s": 0.01},
}
"""What makes a request a sound one, whatever else it has."""
LONG_POLLS = ("/rl/offer_session", "/rl/await_session")
"""Routes that keep a request as long as it says."""
HANG_S = 10.0
"""A request that takes longer counts as one that hangs: the scripted model needs milliseconds."""
CHECKS = [
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
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
    stage = Stage(tmp_path_factory.mktemp("fuzz"), proxy=limits)
    stage.http.timeout = httpx.Timeout(HANG_S)
    yield stage
    stage.close()


def write(name: str, counts: dict[str, Any]) -> None:
    """Put one test's counts beside those of the other."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = counts
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


# Requests ---------------------------------------------------------------------------------------


def operations(stage: Stage) -> Iterator[Any]:
    document = stage.http.get(f"{stage.url}/openapi.json").json()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if not operation.path.startswith("/v1/"):  # the same code answers both
            yield operation


def test_no_request_breaks_the_proxy(stage: Stage) -> None:
    began = time.monotonic()
    routes = {one.path: fuzz(stage, one) for one in operations(stage)}
    total = sum((Counter(counts) for counts in routes.values()), Counter())
    assert total["200"] > 500
    assert total.total() - total["200"] > 500
    seconds = round(time.monotonic() - began, 1)
    write("requests", {"by_status": total, "by_route": routes, "seconds": seconds})
    assert stage.http.get(f"{stage.url}/healthz").json()["requests_in_flight"] == 0


def fuzz(stage: Stage, operation: Any) -> dict[str, int]:
    """Send to one route what its description allows, sound requests with a part of that, and
    what it does not allow."""
    counts: Counter[str] = Counter()
    sound = SOUND.get(operation.path, {})
    opened_by = operation.definition.raw["x-opened-by"]

    def send(case: Any) -> None:
        key = stage.admin_key if opened_by == "admin" else key_for(stage, case.path)
        headers = {"authorization": f"Bearer {key}"}
        answer = case.call(base_url=stage.url, headers=headers, timeout=HANG_S)
        assert answer.status_code < 500, (case.path, case.body, answer.text)
        case.validate_response(answer, checks=CHECKS, headers=headers)
        counts[str(answer.status_code)] += 1

    def send_allowed(case: Any) -> None:
        if operation.path in LONG_POLLS:
            case.body["wait_s"] = 0.01
        send(case)

    allowed = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    examples = settings(QUIET, max_examples=REQUESTS_A_ROUTE)
    examples(given(allowed)(send_allowed))()
    if not operation.body:
        return dict(counts)
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


# Sessions ---------------------------------------------------------------------------------------

DIALECTS = ("chat", "responses", "messages", "completions")
ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
WORDS = st.text("abc xyz<|>\n\0é🦉", max_size=12)
REWARDS = st.one_of(st.floats(-10, 10), st.booleans(), st.integers(-3, 3))


class Played:
    """A session as its client knows it."""

    def __init__(self, session_id: str, key: str) -> None:
        self.session_id = session_id
        self.key = key
        self.said: list[tuple[str, str]] = []
        """Questions and answers so far."""
        self.replies: list[str] = []
        """Ids of completed replies, in order."""
        self.rewards: dict[str, float] = {}
        self.ended = False
        self.was_left = False
        """A stream was left: when its record comes is not known to the client."""

    def body(self, dialect: str, question: str) -> dict[str, Any]:
        """A request that goes on with the conversation."""
        turns = [
            {"role": role, "content": text}
            for asked, said in self.said
            for role, text in (("user", asked), ("assistant", said))
        ]
        turns.append({"role": "user", "content": question})
        if dialect == "completions":
            return {"prompt": "".join(one["content"] for one in turns) or " "}
        if dialect == "responses":
            return {"input": turns}
        return {"messages": turns, "max_tokens": 20}


def reply_of(dialect: str, answer: dict[str, Any]) -> tuple[str, str]:
    """(id, text) of a whole reply."""
    match dialect:
        case "chat":
            return answer["id"], answer["choices"][0]["message"]["content"] or ""
        case "completions":
            return answer["id"], answer["choices"][0]["text"]
        case "messages":
            return answer["id"], answer["content"][0]["text"]
        case _:
            return answer["id"], answer["output"][0]["content"][0]["text"]


def machine(stage: Stage, counts: Counter[str]) -> type[RuleBasedStateMachine]:
    """Sessions that are opened, used, rewarded, ended and exported in any order."""

    def post(route: str, body: Any, key: str | None = None) -> httpx.Response:
        answer = stage.post(route, body, key)
        counts["requests"] += 1
        counts[str(answer.status_code)] += 1
        assert answer.status_code < 500, answer.text
        return answer

    class Sessions(RuleBasedStateMachine):
        sessions = Bundle("sessions")

        @initialize(target=sessions)
        def begin(self) -> Played:
            counts["plays"] += 1
            self.said: dict[str, str] = {}
            self.played: list[Played] = []
            stage.sglang.script = lambda request: Script(**self.said)
            return self.open()

        @rule(text=WORDS.filter(str.strip), finish=st.sampled_from(["eos", "length"]))
        def the_model_changes_its_mind(self, text: str, finish: str) -> None:
            self.said |= {"text": text, "finish": finish}

        @precondition(lambda self: len(self.played) < SESSIONS_A_PLAY)
        @rule(target=sessions)
        def open_another(self) -> Played:
            return self.open()

        def open(self) -> Played:
            counts["sessions"] += 1
            self.played.append(Played(*stage.open_session()))
            return self.played[-1]

        @rule(
            session=sessions, dialect=st.sampled_from(DIALECTS), question=WORDS, keeps=st.booleans()
        )
        def ask(self, session: Played, dialect: str, question: str, keeps: bool) -> None:
            answer = post(ROUTES[dialect], session.body(dialect, question), session.key)
            if session.ended:
                assert answer.status_code in (401, 403)
                return
            if answer.status_code == 400:
                assert "exceed" in answer.text, answer.text
                return
            assert answer.status_code == 200, answer.text
            reply_id, text = reply_of(dialect, answer.json())
            session.replies.append(reply_id)
            if keeps and dialect != "completions":
                session.said.append((question, text))

        @rule(session=sessions, dialect=st.sampled_from(DIALECTS), reads=st.integers(0, 3))
        def stream(self, session: Played, dialect: str, reads: int) -> None:
            """Read a part of a streamed reply and leave."""
            counts["hang_ups"] += 1
            body = {**session.body(dialect, "go on"), "stream": True}
            headers = {"authorization": f"Bearer {session.key}"}
            url = stage.url + ROUTES[dialect]
            with stage.http.stream("POST", url, json=body, headers=headers) as answer:
                assert answer.status_code < 500
                if answer.status_code == 200:
                    session.was_left = True
                    for number, _ in enumerate(answer.iter_lines()):
                        if number >= reads:
                            break

        @rule(session=sessions, reward=REWARDS)
        def reward_the_last(self, session: Played, reward: float) -> None:
            answer = post("/rl/set_reward", {"reward": reward}, session.key)
            self.rewarded(session, answer, reward, session.replies[-1:])

        @rule(session=sessions, reward=REWARDS, data=st.data())
        def reward_any(self, session: Played, reward: float, data: st.DataObject) -> None:
            known = data.draw(st.sampled_from(["unknown", *session.replies]))
            body = {"reward": reward, "interaction_id": known}
            answer = post("/rl/set_reward", body, session.key)
            self.rewarded(session, answer, reward, [known] if known != "unknown" else [])

        def rewarded(
            self, session: Played, answer: httpx.Response, reward: float, expected: list[str]
        ) -> None:
            if answer.status_code == 200:
                counts["rewards"] += 1
                given_to = answer.json()["interaction_id"]
                if not session.was_left:
                    assert [given_to] == expected
                session.rewards[given_to] = float(reward)
            else:
                assert session.ended or not expected, answer.text

        @rule(session=sessions, wrong=st.sampled_from(["NaN", "Infinity", '"1"', "null", "[]"]))
        def reward_wrongly(self, session: Played, wrong: str) -> None:
            answer = stage.http.post(
                f"{stage.url}/rl/set_reward",
                content=f'{{"reward": {wrong}}}',
                headers={"x-api-key": session.key},
            )
            assert 400 <= answer.status_code < 500

        @rule(session=sessions, seldom=st.integers(0, 4))
        def end(self, session: Played, seldom: int) -> None:
            if seldom:
                return  # an ended session plays no more
            assert post("/rl/end_session", {}, session.key).status_code in (200, 403)
            session.ended = True

        @rule(session=consumes(sessions), style=st.sampled_from(["individual", "concat"]))
        def export(self, session: Played, style: str) -> None:
            self.played.remove(session)
            post("/rl/end_session", {}, session.key)
            body = {"session_id": session.session_id, "style": style, "discount": 0.0}
            answer = post("/export_trajectories", body)
            assert answer.status_code == 200, answer.text
            counts["exports"] += 1
            rows = answer.json()["interactions"]
            if style == "individual":
                for reply_id in session.replies:
                    reward = rows[reply_id]["reward"] or 0.0
                    expected = session.rewards.get(reply_id, 0.0)
                    counts["rewards_expected"] += expected != 0.0
                    counts["rewards_exported"] += expected != 0.0 and reward == expected
                    assert reward == expected, reply_id
            assert post("/rl/set_reward", {"reward": 1.0}, session.key).status_code == 401

        def teardown(self) -> None:
            for session in [*self.played]:
                self.export(session, "individual")

    return Sessions


def test_no_order_of_calls_loses_a_reward(stage: Stage) -> None:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    plays = settings(QUIET, max_examples=SESSION_PLAYS, stateful_step_count=STEPS_A_PLAY)
    run_state_machine_as_test(machine(stage, counts), settings=plays)
    assert counts["rewards_exported"] > 100, counts
    give_up_at = time.monotonic() + HANG_S
    while stage.http.get(f"{stage.url}/healthz").json()["requests_in_flight"]:
        assert time.monotonic() < give_up_at, "a call hangs"
        time.sleep(0.05)
    write("sessions", {**counts, "seconds": round(time.monotonic() - began, 1)})
