"""Time in which the process was not awake does not count."""

from areal_hpc.inference.server.sglang_server import HealthProbe
from areal_hpc.wire.awake_clock import MAX_GAP_S, AwakeClock


class Wall:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_short_gaps_count_and_a_pause_does_not() -> None:
    wall = Wall()
    clock = AwakeClock(wall)
    began = clock.now()
    for gap_s, awake_s in ((1.0, 1.0), (MAX_GAP_S, 1.0 + MAX_GAP_S), (70.0, 1.0 + MAX_GAP_S)):
        wall.now_s += gap_s
        assert clock.now() - began == awake_s
    assert clock.woke_at_s == clock.now()


def test_a_server_is_silent_only_while_its_cell_is_awake_and_asks_again() -> None:
    wall = Wall()
    clock = AwakeClock(wall)
    probe = HealthProbe("http://127.0.0.1:9", 30.0, clock)
    for _ in range(28):
        wall.now_s += 1.0
        assert not probe.probe_and_check_timed_out(may_ask=True)
    wall.now_s += 70.0
    assert not probe.probe_and_check_timed_out(may_ask=True)
    silent_s = 0
    while not probe.probe_and_check_timed_out(may_ask=True):
        wall.now_s += 1.0
        silent_s += 1
    assert silent_s > 30
