"""Prometheus on every role of a run: each target is listed, answers, and tells what it should."""

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.killed_run import random_model
from tests.support.small_run import SmallRun, interrupted_at_end, started_from
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

EXPECTED_BY_PROCESS = {
    "trainer": {"areal_hpc_trainer_step", "areal_hpc_trainer_reward_mean"},
    "ledger": {"areal_hpc_ledger_tickets_trained", "areal_hpc_ledger_published_step"},
    "driver": {"areal_hpc_driver_episodes_ended_total", "areal_hpc_driver_tickets_held"},
    "proxy": {"areal_hpc_proxy_prompts_total", "areal_hpc_proxy_sessions"},
    "inference": {"areal_hpc_replica_serving", "sglang:num_running_reqs"},
}


def scrape(run: SmallRun) -> dict[str, dict[str, float]]:
    """By process, what its target tells now."""
    found: dict[str, dict[str, float]] = {}
    for path in run.paths.prometheus_dir.glob("*.json"):
        (target,) = json.loads(path.read_text())
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as answer:
            families = [*text_string_to_metric_families(answer.read().decode())]
        samples = {one.name: one.value for family in families for one in family.samples}
        found.setdefault(target["labels"]["process"].split("-")[0], {}).update(samples)
    return found


def is_complete(run: SmallRun) -> bool:
    try:
        found = scrape(run)
    except (OSError, ValueError):  # a process that has just started, or ended
        return False
    return all(names <= found.get(one, {}).keys() for one, names in EXPECTED_BY_PROCESS.items())


def test_every_process_of_a_run_can_be_scraped(tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(random_model(tmp_path / "model")),
        "cluster.prometheus=true",
        "trainer.total_steps=100000",
        "evaluation.every_steps=0",
    )
    with interrupted_at_end(run):
        run.start()
        wait_for(lambda: is_complete(run), 600.0)
        found = scrape(run)
    assert found["trainer"]["areal_hpc_trainer_step"] >= 1
    assert found["ledger"]["areal_hpc_ledger_tickets_trained"] >= 4
    assert found["driver"]["areal_hpc_driver_episodes_ended_total"] >= 16
    assert found["proxy"]["areal_hpc_proxy_prompts_total"] >= 0
    assert found["inference"]["areal_hpc_replica_serving"] == 1
    assert all(one["process_cpu_seconds_total"] > 0 for one in found.values())
    secret = run.paths.service_key.read_text()
    assert secret.split("\n")[1] not in json.dumps(found)
    assert not [*run.paths.prometheus_dir.glob("*.json")]
