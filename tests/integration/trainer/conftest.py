"""Shared ranks, which start without importing Megatron anew, and a recorded run.

A test that is marked with `on_ranks` runs in so many ranks, and makes its assertions there. It
takes its scenario and the run's paths.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer, get_folder_of_all_workers, rank_server
from tests.support.recorded_run import record_run

STEPS = 6


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_ranks(count): run in so many trainer ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if (marker := pyfuncitem.get_closest_marker("on_ranks")) is None:
        return None
    args: dict[str, Any] = pyfuncitem.funcargs
    outcome = args["ranks"].call(pyfuncitem.obj, args["paths"], *marker.args, **args["scenario"])
    if any(outcome.codes):
        pytest.fail(outcome.log, pytrace=False)
    return True


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    with rank_server(get_folder_of_all_workers(tmp_path_factory)) as server:
        yield server


@pytest.fixture
def scenario(request: pytest.FixtureRequest, ranks: RankServer) -> dict[str, Any]:
    """Return the settings of a test on data-parallel ranks, with the test's own as parameter."""
    (count,) = request.node.get_closest_marker("on_ranks").args
    settings = {"total_steps": STEPS, "parallel": {"dp": count}, **getattr(request, "param", {})}
    return {"trainer": settings}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run of six steps, none of which is trained, for copies."""
    return record_run(tmp_path_factory.mktemp("recorded"), STEPS).root


@pytest.fixture(scope="session")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the same with rows that weights of one or two versions before sampled."""
    return record_run(tmp_path_factory.mktemp("stale"), STEPS, oldest=2).root


@pytest.fixture
def paths(recorded: Path, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(recorded, tmp_path / "run"))
