"""What gives a slow machine longer: limits, waits and the time that a test has."""

import signal
import time
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]

from tests.support import deadlines
from tests.support.deadlines import EXTENSIONS, Deadline, scaled
from tests.support.waiting import wait_for


class Machine:
    """What each further look finds, and a clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: float, *later: float) -> None:
        self.now, self._later = 100.0, [*later]
        monkeypatch.setenv(deadlines.VARIABLE, f"{first}")
        monkeypatch.setattr(deadlines._Known, "slowness", first)
        monkeypatch.setattr(deadlines, "measure_slowness", self._measure)
        monkeypatch.setattr(deadlines, "monotonic", lambda: self.now)

    def _measure(self) -> float:
        return self._later.pop(0)


def test_a_slower_machine_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2.6, 1.0)
    assert scaled(10.0) == 26.0
    deadline = Deadline(10.0)
    machine.now += 25.0
    assert not deadline.is_over()
    assert deadline.left_s == pytest.approx(1.0)
    machine.now += 1.0
    assert deadline.is_over()
    assert scaled(10.0) == 26.0, "a machine that was slow may be slow again"


def test_load_that_began_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1.0, 3.0, 3.0)
    deadline = Deadline(10.0)
    machine.now += 11.0
    assert not deadline.is_over()
    assert (deadline.left_s, scaled(1.0)) == (19.0, 3.0)
    machine.now += 19.0
    assert deadline.is_over()


def test_what_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1.0, *range(2, 2 + EXTENSIONS))
    deadline = Deadline(10.0)
    for _ in range(EXTENSIONS):
        machine.now += 10.0
        assert not deadline.is_over()
    machine.now += 10.0
    assert deadline.is_over(), "nobody looks again"


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deadlines.measure_slowness() >= 1.0
    monkeypatch.setattr(deadlines, "REFERENCE_S", 1e-6)
    assert deadlines.measure_slowness() == deadlines.MOST


def test_a_wait_that_fails_says_how_long_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 2.0, 4.0, 4.0, 4.0)
    monkeypatch.setattr(deadlines, "monotonic", time.monotonic)
    with pytest.raises(AssertionError, match=r"not within 0\.04 s: never"):
        wait_for(lambda: False, 0.01, lambda: "never", every_s=0.001)


@pytest.mark.timeout(5000)
def test_a_test_has_longer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    on_alarm: Any = signal.getsignal(signal.SIGALRM)
    now, known = time.monotonic(), deadlines.get_slowness()
    assert 4000 * known < left_s <= 5000 * known

    monkeypatch.setattr(pytest_timeout, "dump_stacks", lambda terminal: None)
    monkeypatch.setattr(deadlines, "measure_slowness", lambda: 2 * known)
    monkeypatch.setenv(deadlines.VARIABLE, "1")
    monkeypatch.setattr(deadlines._Known, "slowness", known)
    monkeypatch.setattr(deadlines, "monotonic", lambda: now + 6000 * known)
    on_alarm(signal.SIGALRM, None)
    assert 3000 * known < signal.getitimer(signal.ITIMER_REAL)[0] <= 4000 * known
    monkeypatch.setattr(deadlines, "monotonic", lambda: now + 10_000 * known)
    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        on_alarm(signal.SIGALRM, None)
