"""One proxy process for all tests that do not kill it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script


@pytest.fixture(scope="session")
def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(
        tmp_path_factory.mktemp("stage"),
        proxy={"max_request_bytes": 100_000, "request_timeout_s": 30.0},
    )
    yield stage
    stage.close()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """The shared stage, as it was at first."""
    shared_stage.sglang.script = lambda request: Script()
    shared_stage.sglang.requests.clear()
    shared_stage.sglang.aborted.clear()
    shared_stage.sglang.incremental = False
    shared_stage.relay.show(shared_stage.sglang.url)
    shared_stage.ledger.away = False
    return shared_stage


@pytest.fixture
def own_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A stage that the test may break. Its parameter is more of the proxy's configuration."""
    stage = Stage(tmp_path, **getattr(request, "param", {}))
    yield stage
    stage.close()
