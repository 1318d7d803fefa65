"""Online: programs open sessions at the proxy, and the driver finishes its tickets with them."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import TicketGrant, TicketRef
from areal_hpc.wire.proxy import FinishTicketRequest
from tests.integration.rollout.standins import KEY, StandInLedger
from tests.integration.rollout.test_job import config, started_driver
from tests.support.proxy_stage import Stage

GROUP = 4


def visit(stage: Stage, driver: subprocess.Popen[bytes], number: int) -> tuple[dict[str, Any], str]:
    """A program of its own: session, task, conversation, reward. Number 0 leaves without one."""
    while (answer := stage.post("/rl/start_session", {"task_id": "program"})).status_code == 429:
        assert driver.poll() is None, "the ticket was finished before this program had a task"
        time.sleep(0.05)
    assert answer.status_code == 200, answer.text
    opened = answer.json()
    with stage.client(opened["api_key"]) as client:
        client.chat.completions.create(model="any", messages=opened["task"]["messages"])
    if number:
        stage.post("/rl/set_reward", {"reward": number}, opened["api_key"])
    assert stage.post("/rl/end_session", {}, opened["api_key"]).status_code == 200
    return opened["task"], opened["session_id"]


def test_what_programs_do_becomes_the_tickets_episodes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for folder in (paths.data_dir, paths.rendezvous_dir):
        folder.mkdir(parents=True)
    paths.admin_key.write_text(KEY)
    task = {"messages": [{"role": "user", "content": "hi"}]}
    paths.dataset("train").write_text(json.dumps(task) + "\n")
    stage = Stage(tmp_path, online=True)
    ref = TicketRef(0, 0)
    ledger = StandInLedger(paths.rendezvous_dir, [TicketGrant(ref, 0, 0, GROUP)])
    stage.loop.run(ledger.start())
    try:
        with started_driver(paths, config(paths, "", mode="online")) as driver:
            # The one without a reward goes first: after GROUP rewards the ticket is complete.
            visits = [visit(stage, driver, 0)]
            with ThreadPoolExecutor(GROUP) as programs:
                visits += programs.map(partial(visit, stage, driver), range(1, GROUP + 1))
            assert driver.wait(60) == 0
        assert [seen for seen, _ in visits] == [task] * (GROUP + 1)
        assert ledger.finished == {ref}
        judged = [session_id for _, session_id in visits[1:]]
        finished = stage.post("/rl/finish_ticket", FinishTicketRequest(ref, judged))
        assert finished.json() == {"rows": GROUP}
    finally:
        stage.loop.run(ledger.kill())
        stage.close()
