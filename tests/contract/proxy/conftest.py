"""Shared proxy process of all tests that do not kill it."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.normalizers import without_clock
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

_ticket_ids = itertools.count(1000)


@pytest.fixture(scope="session")
def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(
        tmp_path_factory.mktemp("stage"),
        proxy={"max_request_bytes": 100_000, "request_timeout_s": scaled(30.0)},
    )
    yield stage
    stage.close()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """Return the shared stage in its first state."""
    shared_stage.sglang.script = lambda request: Script()
    shared_stage.sglang.requests.clear()
    shared_stage.sglang.aborted.clear()
    shared_stage.sglang.incremental = False
    shared_stage.relay.show(shared_stage.sglang.url)
    shared_stage.ledger.away = False
    return shared_stage


@pytest.fixture(scope="session")
def small_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Start a stage with small limits; a session outlives the second before an SDK's repeat."""
    stage = Stage(
        tmp_path_factory.mktemp("small"),
        proxy={
            "max_concurrent_calls": 2,
            "max_messages": 5,
            "max_sessions": 3,
            "session_timeout_s": scaled(4.0),
            "message_normalizer": f"{without_clock.__module__}:{without_clock.__name__}",
        },
        shards={"seal_after_s": 0.3},
    )
    yield stage
    stage.close()


@pytest.fixture
def small_key(small_stage: Stage) -> Iterator[str]:
    """Return the key of a session of the small stage."""
    small_stage.sglang.script = lambda request: Script()
    small_stage.sglang.requests.clear()
    _, key = small_stage.open_session()
    yield key
    small_stage.end_session(key)


@pytest.fixture
def key(stage: Stage) -> str:
    """Return the key of a session whose ticket is not finished."""
    return stage.open_session(TicketRef(1, 0))[1]


@pytest.fixture(params=["cumulative", "incremental"])
def pieces(stage: Stage, request: pytest.FixtureRequest) -> None:
    """Return the pieces of a stream: the whole text so far, or only its new part."""
    stage.sglang.incremental = request.param == "incremental"


@pytest.fixture
def ref(stage: Stage) -> TicketRef:
    """Return a ticket of this test alone, whose finished sessions are sealed and settled."""
    stage.seal()
    stage.ledger.settled.clear()
    stage.ledger.dropped.clear()
    return TicketRef(next(_ticket_ids), 2)


@pytest.fixture
def own_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Start a stage that the test may break, with further proxy configuration as its parameter."""
    stage = Stage(tmp_path, **getattr(request, "param", {}))
    yield stage
    stage.close()
