"""Mutated requests, in any order: no service dies, hangs, or loses or spoils data.

Schemathesis makes valid and invalid requests from the proxy's own description; a hypothesis state
machine plays sessions. The test also mutates 50,000 calls, over every route of proxy, ledger and
control proxy. A few calls of the proxy grow to as much as 32 MiB and are sent alone: their time in
the event loop's thread bounds the delay of other calls. After every thousand calls the test kills
and restarts each service, plays and seals tickets, and takes a step of Megatron on them. No service
dies or hangs, every row is valid, and services refuse each request with a spoiled key. Counts go
to `benchmarks/results/fuzz.json` after every thousand, and the next run continues from them.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
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

from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.manifests import read_quarantine_files
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.replicas import FORWARDED_ROUTES
from areal_hpc.wire.trajectory import find_row_defect
from tests.acceptance.session_machine import Sessions
from tests.support.commands import audit_of
from tests.support.light_run import BATCH_TICKETS, ENTRIES, LightRun, light_run
from tests.support.mutated_calls import (
    CONTENTS,
    GOOGLE,
    MODEL,
    RESPONSE_ID,
    Mutator,
    RawCall,
    Sender,
    list_sound_calls,
)
from tests.support.proxy_stage import Stage
from tests.support.rank_server import rank_server
from tests.support.results import add_results, read_results
from tests.support.service_keys import is_refused
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:schemathesis"),
]

REQUESTS_A_ROUTE = 40
"""Number of requests of each kind: as described, sound, and wrong."""
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
"""Least body of a sound request, by route."""
LONG_POLLS = ("/rl/offer_episode", "/rl/await_session")
"""Routes that hold a request for the time that it gives."""
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
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if not operation.path.startswith(("/v1/", "/v1alpha/")):  # the same code answers all
            yield operation


def test_no_request_breaks_the_proxy(stage: Stage) -> None:
    began = time.monotonic()
    routes = {operation.path: fuzz(stage, operation) for operation in operations(stage)}
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


CALLS, CALLS_A_ROUND = 50_000, 1000
CALLERS = 6
SWOLLEN_CALLS_A_ROUND, MAX_HOLD_S = 6, 0.3
PROXY_POST = ("proxy", "POST")
VOCAB = 320
"""Vocabulary of the light run's model."""
MAX_RESIDENT_MB = 1500
MAY_FAIL = {"502", "503", "504"}
"""Statuses by which a healthy service reports a server behind it that refuses on request."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LightRun]:
    limits = {"request_timeout_s": 5.0}
    steps = CALLS // CALLS_A_ROUND
    with (
        rank_server() as ranks,
        light_run(
            tmp_path / "runs" / "run", tmp_path / "scratch", ranks, total_steps=steps, proxy=limits
        ) as run,
    ):
        yield run


def test_no_call_kills_or_hangs_a_service_or_spoils_a_row(run: LightRun) -> None:
    counts = read_counts()
    assert_every_route_is_called(run)
    while counts["calls"] < CALLS:
        began = time.monotonic()
        chance = random.Random(20261125 + counts["calls"])
        statuses, refused_keys = call_wrongly(run, chance)
        hold_s, held_by = send_swollen_calls(run, chance, statuses)
        assert_well(run)
        work_honestly(run)
        counts["calls"] += statuses.total()
        counts["steps"] += 1
        counts["restarts"] += len(ENTRIES)
        for name, new_counts in (("by_status", statuses), ("refused_keys", refused_keys)):
            counts[name] = dict(sorted((Counter(counts[name]) + new_counts).items()))
        counts["swollen"] += SWOLLEN_CALLS_A_ROUND
        if hold_s > counts["longest_hold_s"]:
            counts |= {"longest_hold_s": hold_s, "longest_held_by": held_by}
        counts["seconds"] += round(time.monotonic() - began)
        add_results("fuzz", mutated_calls=counts)
        assert counts["longest_hold_s"] <= MAX_HOLD_S, counts["longest_held_by"]
    # A mutated call may have been sound, and have had a ticket sealed that no step has trained yet.
    assert "duplicates=0 lost=0 " in audit_of(run.paths.root)


def assert_every_route_is_called(run: LightRun) -> None:
    """Compare the calls with the routes that the services list."""
    calls, _ = list_sound_calls(run)
    called = {
        service: {(call.method, call.path) for call in calls if call.service == service}
        for service in ENTRIES
    }
    document = run.http.get(f"{run.url('proxy')}/openapi.json").json()
    assert called["proxy"] == {
        (method.upper(), path.replace("{response_id}", RESPONSE_ID).replace("{model}", MODEL))
        for path, methods in document["paths"].items()
        for method in methods
    }
    headers = run.build_headers("ledger")
    refused = run.http.post(f"{run.url('ledger')}/unknown", headers=headers).json()["error"]
    listed = refused.splitlines()[0].partition("routes: ")[2].split()
    assert called["ledger"] == {("POST", path) for path in listed}
    assert {path.rpartition("/")[2] for _, path in called["inference"]} > FORWARDED_ROUTES


def read_counts() -> dict[str, Any]:
    """Read the counts of a run that was cut off; nothing if all was done."""
    nothing: dict[str, Any] = {"calls": 0, "of": CALLS, "steps": 0, "restarts": 0, "seconds": 0}
    nothing |= {"by_status": {}, "refused_keys": {}, "swollen": 0, "longest_hold_s": 0.0}
    counts: dict[str, Any] = read_results("fuzz", {}).get("mutated_calls", nothing)
    return nothing if counts["calls"] >= CALLS else counts


def call_wrongly(run: LightRun, chance: random.Random) -> tuple[Counter[str], Counter[str]]:
    """A thousand calls, several at a time; the statuses that they were answered with, and the
    defects of the keys that were refused."""
    statuses: Counter[str] = Counter()
    refused_keys: Counter[str] = Counter()
    senders = {service: Sender(run.url(service), run.service_key) for service in ENTRIES}
    mutator = Mutator(chance, [run.key(service) for service in ENTRIES])
    with ThreadPoolExecutor(CALLERS) as pool:
        for _ in range(10):
            sound, mutator.known = list_sound_calls(run)
            # Every route alike, whatever number of calls there is of it.
            raws = [mutator.mutate(chance.choice(sound)) for _ in range(CALLS_A_ROUND // 10)]
            for raw, status in zip(
                raws, pool.map(lambda raw: send(senders, raw), raws), strict=True
            ):
                assert status[:1] != "5" or status in MAY_FAIL, (
                    f"{status} {shorten(raw)}\n{run.said()}"
                )
                statuses[status] += 1
                if raw.key_defect != "none":
                    assert is_refused(status, raw.key_defect), f"{status} {shorten(raw)}"
                    refused_keys[raw.key_defect] += 1
    return statuses, refused_keys


def send_swollen_calls(
    run: LightRun, chance: random.Random, statuses: Counter[str]
) -> tuple[float, str]:
    """The most that one of them took of the event loop's thread once it had come, and which did."""
    process, sender = psutil.Process(run.pid("proxy")), Sender(run.url("proxy"), run.service_key)
    before: dict[int, float] = {}

    def measure() -> dict[int, float]:
        return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}

    def let_proxy_read_then_measure() -> None:
        nonlocal before
        for _ in range(3):  # it takes connections in turn
            health(run)
        before = measure()

    longest = (0.0, "")
    for _ in range(SWOLLEN_CALLS_A_ROUND):
        sound = [
            call for call in list_sound_calls(run)[0] if (call.service, call.method) == PROXY_POST
        ]
        raw = Mutator(chance).swell(chance.choice(sound))
        status = sender.send(raw, let_proxy_read_then_measure)
        assert status[:1] != "5" or status in MAY_FAIL, f"{status} {shorten(raw)}\n{run.said()}"
        statuses[status] += 1
        loop_thread = max(before, key=before.__getitem__)  # no other works on every call
        taken = measure()[loop_thread] - before[loop_thread]
        what = f"{len(raw.content)} bytes, {raw.method} {raw.path}: {raw.content[-100:]!r}"
        longest = max(longest, (round(taken, 2), what))
    return longest


def send(senders: dict[str, Sender], raw: RawCall) -> str:
    try:
        return senders[raw.call.service].send(raw)
    except (TimeoutError, ConnectionError) as error:
        raise AssertionError(f"{error!r}: {shorten(raw)}") from error


def shorten(raw: RawCall) -> str:
    return f"{raw.method} {raw.path} {raw.headers[1:]} {raw.content[:300]!r} {raw.key_defect}"


def assert_well(run: LightRun) -> None:
    """Check that services live, have forgotten the calls, and have kept little of them."""
    for service in ENTRIES:
        assert run.is_alive(service), (service, run.said())
        resident_mb = psutil.Process(run.pid(service)).memory_info().rss / 1e6
        assert resident_mb < MAX_RESIDENT_MB, (service, resident_mb)
    run.await_true(lambda: not health(run)["requests_in_flight"])


def health(run: LightRun) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{run.url('proxy')}/healthz", trust_env=False).json()
    return answer


def work_honestly(run: LightRun) -> None:
    for service in ENTRIES:
        run.restart(service)
    run.open_generation()
    run.seal()
    run.play(BATCH_TICKETS)
    run.seal()
    run.train()
    checkpoint = find_latest_checkpoint(run.paths.checkpoints_dir)
    assert checkpoint is not None
    assert checkpoint.state.step == run.step
    assert checkpoint.state.untrained == [], "an unsound row was sealed"
    assert read_quarantine_files(run.paths) == {}
    for shard in read_index(run.paths.shard_index_dir)[-2:]:
        for row in ShardReader(run.paths.shards_dir / shard.file).read_rows([*range(shard.rows)]):
            assert not find_row_defect(row, VOCAB), (shard.file, row)
