"""The endpoint of a process for Prometheus, and the file that it is found by."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry import prometheus
from areal_hpc.rundir.telemetry.prometheus import (
    PrometheusSample,
    build_samples,
    register_sample_reader,
    serve_process_metrics,
)


@pytest.fixture(autouse=True)
def _readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_readers", [])


def scrape(paths: RunPaths) -> dict[str, tuple[str, float]]:
    """Type and value of each sample, from the one target that Prometheus would find."""
    (target,) = json.loads(paths.prometheus_target("cell-0-driver").read_text())
    assert target["labels"] == {"run": "some/run", "job": "cell-0", "process": "driver"}
    (address,) = target["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {one.name: (family.type, one.value) for family in families for one in family.samples}


def test_a_process_tells_its_own_numbers_and_those_of_its_role(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "some" / "run")
    rows = {"step": 1, "reward/mean": 0.5, "limit": "tools", "episodes_total": 7, "bad": None}

    def broken() -> Iterator[PrometheusSample]:
        yield PrometheusSample("areal_hpc_never", 1.0)
        raise OSError("no answer")

    register_sample_reader(lambda: build_samples("areal_hpc_driver", rows))
    register_sample_reader(broken)
    with serve_process_metrics(paths, "cell-0", "driver", "127.0.0.1"):
        found = scrape(paths)
        rows["step"] = 2
        again = scrape(paths)
    assert found["areal_hpc_driver_step"] == ("gauge", 1.0)
    assert found["areal_hpc_driver_reward_mean"] == ("gauge", 0.5)
    assert found["areal_hpc_driver_episodes_total"] == ("counter", 7.0)
    assert again["areal_hpc_driver_step"] == ("gauge", 2.0)
    assert found["process_resident_memory_bytes"][1] > 1e6
    assert not [name for name in found if "limit" in name or "bad" in name or "never" in name]
    assert not paths.prometheus_target("cell-0-driver").exists()


def test_a_port_that_others_reach_asks_for_the_key_of_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "some" / "run")
    with serve_process_metrics(paths, "cell-0", "driver", "localhost"):
        (target,) = json.loads(paths.prometheus_target("cell-0-driver").read_text())
        url = f"http://{target['targets'][0]}/metrics"
        assert httpx.get(url, trust_env=False).status_code == 401
        key = {"authorization": f"Bearer {paths.metrics_key.read_text().strip()}"}
        assert "process_resident_memory_bytes" in httpx.get(url, headers=key, trust_env=False).text
    assert paths.metrics_key.stat().st_mode & 0o777 == 0o600


def test_a_process_goes_on_unserved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = RunPaths(tmp_path)
    with serve_process_metrics(paths, "cell-0", "driver", "192.0.2.1"):  # of no machine
        pass
    assert "Prometheus cannot scrape this process" in caplog.text
    tmp_path.joinpath("prometheus").write_text("no folder")
    with serve_process_metrics(paths, "cell-0", "driver", "127.0.0.1"):
        pass
