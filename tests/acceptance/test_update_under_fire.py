"""Death or hang of each party of an update in each phase: survivors, and their waits."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.wire.replicas import ReplicaView
from tests.support.deadlines import Deadline, scaled
from tests.support.inference_cell import Cell, running_cell, tiny_qwen3
from tests.support.results import add_results
from tests.support.senders import Senders
from tests.support.update_faults import Gate, Reader, Trap, gates
from tests.support.weight_updates import save_update

pytestmark = pytest.mark.timeout(900)

CELLS = 3
VICTIM = 1
START_TIMEOUT_S = 300.0
"""Three servers may start at once."""
UPDATE_TIMEOUT_S = 15.0
IN_FLIGHT_S = 0.3
"""Age of a call when its party is struck."""
PHASES = {
    "before join": ("init_weights_update_group", 1, False),
    "join": ("init_weights_update_group", 1, True),
    "paused": ("begin_weight_update", 1, False),
    "begin": ("begin_weight_update", 1, True),
    "broadcast": ("update_weights_from_distributed", 1, True),
    "half loaded": ("update_weights_from_distributed", 2, False),
    "end": ("end_weight_update", 1, True),
    "verify": ("score", 1, True),
}
"""(route, which call of it, struck while the call is under way; else before it)."""
UNTOUCHED = ("paused",)
"""Phases in which the replicas still hold the old weights, and answer when the sender dies.

A replica that joins calls the dead sender for minutes, deaf to all else: its cell restarts it."""
HANGING = "scheduler, which hangs"
PARTIES = ("sender", "sender, next one at once", "server", "scheduler", HANGING, "cell")

Row = dict[str, Any]


class Field:
    """Three cells under load, and senders that follow one another."""

    def __init__(self, cells: list[Cell], gates: list[Gate], directory: Path) -> None:
        self.cells = cells
        self._gates = gates
        self._directory = directory
        self._generations = itertools.count(1)
        self._steps = itertools.count()
        self._models: dict[str, Any] = {}
        self.readers = [Reader(cell, 0, self._models) for cell in cells]
        self.sender = self._new_sender()
        self._spare = self._new_sender()
        self.sender.await_ready()

    def _new_sender(self) -> Senders:
        return Senders(
            self._directory,
            self._directory,
            cells=CELLS,
            service_key=self.cells[0].service_key,
            generation=next(self._generations),
            update_timeout_s=UPDATE_TIMEOUT_S,
        )

    def next_sender(self) -> None:
        """Start the trainer again; its last start is gone or goes now."""
        self.sender.stop()
        self.sender, self._spare = self._spare, self._new_sender()
        self.sender.await_ready()

    def await_spare(self) -> None:
        """Wait until the next sender has imported all it needs, which takes a core."""
        self._spare.await_ready()

    def stop(self) -> None:
        for reader in self.readers:
            reader.stop()
        self.sender.stop()
        self._spare.stop()

    def new_weights(self) -> tuple[int, Path]:
        step = next(self._steps)
        path = self._directory / f"{step}.safetensors"
        model = tiny_qwen3(step)
        save_update(model, path)
        # Whichever sender is the one to send them.
        for generation in range(self.sender.generation, self.sender.generation + 3):
            self._models[f"{generation}.{step}"] = model
        return step, path

    def views(self) -> list[ReplicaView]:
        return [cell.replica() for cell in self.cells]

    def heal(self, step: int, path: Path) -> int:
        """Send like a trainer does, every second, until all replicas have it; how often."""
        version, sends = f"{self.sender.generation}.{step}", 0
        deadline = Deadline(START_TIMEOUT_S)
        while any(view.version != version for view in self.views()):
            assert not deadline.is_over(), [self.views(), *map(Cell.logs, self.cells)]
            if any(is_up(view) and view.version != version for view in self.views()):
                self.sender.publish(step, path, at_least=0)
                sends += 1
            time.sleep(1.0)
        return sends

    def set_traps(self, phase: str, party: str) -> Callable[[], float]:
        """Arrange the kill; the returned function waits for it and returns its time."""
        route, nth, is_in_flight = PHASES[phase]
        of_sender = party.startswith("sender")
        struck = threading.Event()
        struck_at = [0.0]
        # Who is held, so that the call does not end before the kill. A replica that joins waits
        # for the sender; all other calls end by themselves.
        concerned = self.cells if of_sender else [self.cells[VICTIM]]
        held = [cell.scheduler() for cell in concerned]
        if of_sender and phase == "join":
            held = [psutil.Process(self.sender.processes[0].pid)]

        def hold() -> None:
            for process in held if is_in_flight else []:
                process.suspend()

        def strike() -> None:
            struck_at[0] = time.monotonic()
            self._process(party).send_signal(signal.SIGSTOP if party == HANGING else signal.SIGKILL)
            for process in held if party != HANGING else []:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            struck.set()

        calls = CELLS if of_sender else 1
        arrived = threading.Barrier(calls, hold, timeout=scaled(30))
        under_way = threading.Barrier(calls, strike, timeout=scaled(30))

        def spring(forward: Callable[[], None]) -> None:
            arrived.wait()
            call = threading.Thread(target=forward)
            if is_in_flight:
                call.start()
                time.sleep(IN_FLIGHT_S)
            under_way.wait()
            if not is_in_flight and (phase == "before join" or not of_sender):
                call.start()
            if call.ident is not None:
                call.join()

        for gate, cell in zip(self._gates, self.cells, strict=True):
            if cell in concerned:
                gate.trap = Trap(route, nth, 0, spring)

        def wait() -> float:
            assert struck.wait(60), "the phase was never reached"
            return struck_at[0]

        return wait

    def _process(self, party: str) -> psutil.Process:
        victim = self.cells[VICTIM]
        if party in ("scheduler", HANGING):
            return victim.scheduler()
        if party == "server":
            return victim.engine()
        return psutil.Process(victim.job.pid if party == "cell" else self.sender.processes[0].pid)

    def clear_traps(self) -> None:
        for gate in self._gates:
            gate.trap = None


def is_up(view: ReplicaView) -> bool:
    return view.state in ("ready", "serving")


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    run_dir = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        cells = [
            stack.enter_context(running_cell(run_dir, tiny_qwen3(0), name=f"cell-{index}"))
            for index in range(CELLS)
        ]
        for cell in cells:
            cell.await_replica(lambda view: view.state == "ready", timeout_s=START_TIMEOUT_S)
        directory = run_dir / "gates"
        gated = stack.enter_context(gates(cells, directory))
        field = Field(cells, gated, directory)
        stack.callback(field.stop)
        field.heal(*field.new_weights())
        for reader in field.readers:
            reader.start()
        yield field


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("party", PARTIES)
def test_agents_get_only_verified_weights(field: Field, party: str, phase: str) -> None:
    field.next_sender()  # all phases, the joining of groups too, come in each update
    field.await_spare()  # joining beside it has been late once
    old, before = field.views()[0].version, field.views()
    step, path = field.new_weights()
    wait = field.set_traps(phase, party)
    field.sender.order(step, path, CELLS)
    struck_at = wait()
    report = field.sender.read()
    field.clear_traps()
    row: Row = {}
    if party.startswith("sender"):
        assert report is None
        if party == "sender":
            row["alone_s"] = round(await_own_end(field, old, before, phase) - struck_at, 1)
        field.next_sender()
    else:
        assert report is not None
        row["sender_waits_s"] = round(report["ended_at"] - struck_at, 2)
        assert sorted(report["ok"]) == [["cell-0", 0], ["cell-2", 0]]
        assert row["sender_waits_s"] < UPDATE_TIMEOUT_S + 5
        if party == "cell":
            field.cells[VICTIM].job.wait()
            field.cells[VICTIM].start()  # as its supervisor would
    row["sends"] = field.heal(step, path)
    time.sleep(0.5)  # a reply under the new weights from everyone
    row |= outcome(field, before, struck_at)
    assert [reader.wrong for reader in field.readers] == [[], [], []]
    if not party.startswith("sender"):
        assert set(row["restarted"]) <= {"cell-1"}, "a failure is its own group's alone"
    elif phase in UNTOUCHED:
        assert row["restarted"] == []
    add_results("update_under_fire", **{f"{party}, {phase}": row})


def await_own_end(field: Field, old: str, before: list[ReplicaView], phase: str) -> float:
    """Wait until the cells have ended the dead sender's update, without a sender."""
    for cell, past in zip(field.cells, before, strict=True):
        assert cell.replica().version in ("", old)
        if phase in UNTOUCHED:
            cell.await_replica(lambda view: view.version == old, timeout_s=START_TIMEOUT_S)
        else:

            def is_back(view: ReplicaView, past: ReplicaView = past) -> bool:
                return view.incarnation > past.incarnation and view.state == "ready"

            after = cell.await_replica(is_back, timeout_s=START_TIMEOUT_S)
            assert after.version == ""
    return time.monotonic()


def outcome(field: Field, before: list[ReplicaView], struck_at: float) -> Row:
    now = time.monotonic()
    silences_s = [reader.longest_silence_s(struck_at - 0.5, now) for reader in field.readers]
    victim_silence_s = silences_s.pop(VICTIM)
    restarted = [
        cell.name
        for cell, past, view in zip(field.cells, before, field.views(), strict=True)
        if view.incarnation > past.incarnation
    ]
    return {
        "others_silent_s": round(max(silences_s), 1),
        "victim_silent_s": round(victim_silence_s, 1),
        "restarted": restarted,
        "replies_checked": sum(len(reader.answered) for reader in field.readers),
    }
