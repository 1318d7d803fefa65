"""Failed tries of episodes, counted from the drivers' events."""

from pathlib import Path
from typing import Any

from areal_hpc.metrics.step_metrics import EpisodeFailureCounter, FailureCounts
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.view.state.run_view import find_early_alert


def failure(event: str = "episode_failed", **facts: Any) -> dict[str, Any]:
    return {"time": 1.0, "role": "driver-cell-0", "event": event, "eval_step": -1, **facts}


def test_new_failures_of_training_episodes_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, failure())
    counter = EpisodeFailureCounter(path)
    assert counter.count_new_failed_tries() == FailureCounts(), "what was there before is no news"
    earning = failure("episode_timed_out", reward=-0.5)
    for event in (failure(), earning, failure("episode_unserved"), failure(eval_step=5),
                  {"event": "alert"}):  # fmt: skip
        append_line(path, event)
    assert counter.count_new_failed_tries() == FailureCounts(failed_tries=2, rewarded=1)
    assert counter.count_new_failed_tries() == FailureCounts()


def test_a_line_in_the_writing_is_counted_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    counter = EpisodeFailureCounter(path)
    assert counter.count_new_failed_tries().failed_tries == 0, "there is no log yet"
    append_line(path, failure())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert counter.count_new_failed_tries().failed_tries == 1
    path.write_bytes(whole + whole)
    assert counter.count_new_failed_tries().failed_tries == 1


def test_good_held_out_episodes_do_not_hide_that_all_training_episodes_fail() -> None:
    all_of_training = [failure(failed=n, ended=256 + n) for n in range(1, 13)]
    alert = find_early_alert(all_of_training)
    assert alert is not None
    assert alert.message.startswith("12 tries of episodes failed")
    counted = {"event": "episodes_counted", "role": "driver-cell-0", "failed": 12, "ended": 900}
    assert find_early_alert([*all_of_training, counted]) is None
