"""Sessions of a proxy as a hypothesis state machine: any order of a client's calls.

A reward that was given is the one that is exported.
"""

from collections import Counter
from typing import Any

import httpx
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)

from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

SESSIONS_A_PLAY = 3
ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
WORDS = st.text("abc xyz<|>\n\0é🦉", max_size=12)
REWARDS = st.one_of(st.floats(-10, 10), st.booleans(), st.integers(-3, 3))


class Played:
    def __init__(self, session_id: str, key: str) -> None:
        self.session_id = session_id
        self.key = key
        self.said: list[tuple[str, str]] = []
        """Questions and replies so far."""
        self.replies: list[str] = []
        self.rewards: dict[str, float] = {}
        self.ended = False
        self.was_left = False
        """The client left a stream, so it does not know when its record comes."""

    def body(self, dialect: str, question: str) -> dict[str, Any]:
        turns = [
            {"role": role, "content": text}
            for earlier, reply in self.said
            for role, text in (("user", earlier), ("assistant", reply))
        ]
        turns.append({"role": "user", "content": question})
        if dialect == "completions":
            return {"prompt": "".join(turn["content"] for turn in turns) or " "}
        if dialect == "responses":
            return {"input": turns}
        return {"messages": turns, "max_tokens": 20}


def reply_of(dialect: str, answer: dict[str, Any]) -> tuple[str, str]:
    match dialect:
        case "chat":
            return answer["id"], answer["choices"][0]["message"]["content"] or ""
        case "completions":
            return answer["id"], answer["choices"][0]["text"]
        case "messages":
            return answer["id"], answer["content"][0]["text"]
        case _:
            return answer["id"], answer["output"][0]["content"][0]["text"]


class Sessions(RuleBasedStateMachine):
    """Sessions of one play: each step of a client, and the checks after it."""

    sessions = Bundle("sessions")

    def __init__(self, stage: Stage, counts: Counter[str]) -> None:
        super().__init__()
        self.stage = stage
        self.counts = counts
        """Counts of events over all plays."""
        self.said: dict[str, Any] = {}
        """Current replies of the model."""
        self.played: list[Played] = []

    def post(self, route: str, body: Any, key: str | None = None) -> httpx.Response:
        answer = self.stage.post(route, body, key)
        self.counts["requests"] += 1
        self.counts[str(answer.status_code)] += 1
        assert answer.status_code < 500, answer.text
        return answer

    @initialize(target=sessions)
    def begin(self) -> Played:
        self.counts["plays"] += 1
        self.stage.sglang.script = lambda request: Script(**self.said)
        return self.open()

    @rule(text=WORDS.filter(str.strip), finish=st.sampled_from(["eos", "length"]))
    def the_model_changes_its_mind(self, text: str, finish: str) -> None:
        self.said |= {"text": text, "finish": finish}

    @precondition(lambda self: len(self.played) < SESSIONS_A_PLAY)
    @rule(target=sessions)
    def open_another(self) -> Played:
        return self.open()

    def open(self) -> Played:
        self.counts["sessions"] += 1
        self.played.append(Played(*self.stage.open_session()))
        return self.played[-1]

    @rule(session=sessions, dialect=st.sampled_from([*ROUTES]), question=WORDS, keeps=st.booleans())
    def ask(self, session: Played, dialect: str, question: str, keeps: bool) -> None:
        answer = self.post(ROUTES[dialect], session.body(dialect, question), session.key)
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

    @rule(session=sessions, dialect=st.sampled_from([*ROUTES]), reads=st.integers(0, 3))
    def stream(self, session: Played, dialect: str, reads: int) -> None:
        self.counts["hang_ups"] += 1
        body = session.body(dialect, "go on")
        with self.stage.stream(ROUTES[dialect], body, session.key) as answer:
            assert answer.status_code < 500
            if answer.status_code == 200:
                session.was_left = True
                for number, _ in enumerate(answer.iter_lines()):
                    if number >= reads:
                        break

    @rule(session=sessions, reward=REWARDS)
    def reward_the_last(self, session: Played, reward: float) -> None:
        answer = self.post("/rl/set_reward", {"reward": reward}, session.key)
        self.rewarded(session, answer, reward, session.replies[-1:])

    @rule(session=sessions, reward=REWARDS, data=st.data())
    def reward_any(self, session: Played, reward: float, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(["unknown", *session.replies]))
        body = {"reward": reward, "interaction_id": known}
        answer = self.post("/rl/set_reward", body, session.key)
        self.rewarded(session, answer, reward, [known] if known != "unknown" else [])

    def rewarded(
        self, session: Played, answer: httpx.Response, reward: float, expected: list[str]
    ) -> None:
        if answer.status_code == 200:
            self.counts["rewards"] += 1
            given_to = answer.json()["interaction_id"]
            if not session.was_left:
                assert [given_to] == expected
            session.rewards[given_to] = float(reward)
        else:
            assert session.ended or not expected, answer.text

    @rule(session=sessions, wrong=st.sampled_from(["NaN", "Infinity", '"1"', "null", "[]"]))
    def reward_wrongly(self, session: Played, wrong: str) -> None:
        body = f'{{"reward": {wrong}}}'.encode()
        answer = self.stage.post("/rl/set_reward", body, session.key)
        assert 400 <= answer.status_code < 500

    @rule(session=sessions, seldom=st.integers(0, 4))
    def end(self, session: Played, seldom: int) -> None:
        if seldom:
            return  # an ended session plays no more
        assert self.post("/rl/end_session", {}, session.key).status_code in (200, 403)
        session.ended = True

    @rule(session=consumes(sessions), style=st.sampled_from(["individual", "concat"]))
    def export(self, session: Played, style: str) -> None:
        self.played.remove(session)
        self.post("/rl/end_session", {}, session.key)
        body = {"session_id": session.session_id, "style": style, "discount": 0.0}
        answer = self.post("/export_trajectories", body)
        assert answer.status_code == 200, answer.text
        self.counts["exports"] += 1
        rows = answer.json()["interactions"]
        if style == "individual":
            for reply_id in session.replies:
                reward = rows[reply_id]["reward"] or 0.0
                expected = session.rewards.get(reply_id, 0.0)
                self.counts["rewards_expected"] += expected != 0.0
                self.counts["rewards_exported"] += expected != 0.0 and reward == expected
                assert reward == expected, reply_id
        assert self.post("/rl/set_reward", {"reward": 1.0}, session.key).status_code == 403

    def teardown(self) -> None:
        for session in [*self.played]:
            self.export(session, "individual")
