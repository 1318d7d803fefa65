"""Kills or holds processes of a run at named points. Python imports this where PYTHONPATH names it.

`AREAL_HPC_FAULTS` names a JSON file: `{"run_dir": ..., "rest_s": ..., "faults": [{"name": ...,
"point": "package.module:function", "moment": ..., "victim": ...}, ...]}`. Faults strike in order,
each once in the life of the run: a file beside the JSON file with the fault's name says when, and
which process was killed. Moments: `before` the call; `torn`, when half of the record that the call
appends is written; `during`, a moment into it. A fault waits for its victim to live, and for
`rest_s` after the one before it. With the moment `held` nobody dies, and there is no order: while
a file `NAME.gate` lies beside the JSON file, the first process that comes to the point waits there,
for as long as that file does.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

DURING_S = 0.03
LONGEST_HOLD_S = 300.0
"""A test that died leaves its gate behind."""


def victims(party: str, run_dir: str) -> list[int]:
    """Live processes of a party: an entry point, or `server` for the keeper's children."""
    entry = "areal_hpc.inference.job:run" if party == "server" else party
    processes = {int(path.name): path for path in Path("/proc").glob("[0-9]*")}
    found = []
    for pid, path in processes.items():
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if entry in command and any(run_dir in word for word in command):
            found.append(pid)
    if party != "server":
        return found
    children = []
    for pid, path in processes.items():
        try:
            status = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if status[0] != "Z" and int(status[1]) in found:
            children.append(pid)
    return children


class Fault:
    """One kill to come."""

    def __init__(self, plan: Path, settings: dict[str, Any], place: int) -> None:
        fault = settings["faults"][place]
        self.point: str = fault["point"]
        self.moment: str = fault["moment"]
        self._victim: str = fault.get("victim", "")
        self._run_dir: str = settings["run_dir"]
        self._rest_s: float = settings["rest_s"]
        self._mark = plan.with_name(fault["name"])
        self._gate = plan.with_name(f"{fault['name']}.gate")
        before = settings["faults"][place - 1]["name"] if place else None
        self._before = plan.with_name(before) if before else None

    def is_due(self) -> bool:
        if self._mark.exists():
            return False
        if self.moment == "held":
            return self._gate.exists()
        if self._before is None:
            return True
        return self._before.exists() and time.time() - self._before.stat().st_mtime >= self._rest_s

    def strike(self) -> None:
        found = victims(self._victim, self._run_dir)
        if found and self._is_first({"killed": found}):
            for pid in found:
                os.kill(pid, signal.SIGKILL)

    def hold(self) -> None:
        if self._is_first({"held": os.getpid()}):
            give_up_at = time.monotonic() + LONGEST_HOLD_S
            while self._gate.exists() and time.monotonic() < give_up_at:
                time.sleep(0.05)

    def _is_first(self, facts: dict[str, Any]) -> bool:
        """Leave the mark, unless another rank or thread that is as far has done so."""
        try:
            with self._mark.open("x") as stream:
                json.dump({"time": time.time(), "at": self.point, **facts}, stream)
        except FileExistsError:
            return False
        return True


def tear(fault: Fault, journal: Any, kind: int, payload: bytes) -> None:
    """Strike when half of a record is in the journal; who survives that finds it whole again."""
    from areal_hpc.shards.journal import encode_header

    record = encode_header(kind, payload) + payload
    with journal._appending:
        os.write(journal._descriptor, record[: len(record) // 2])
        fault.strike()
        os.ftruncate(journal._descriptor, journal.bytes_written)


def wrapped(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if fault.is_due():
            if fault.moment == "during":
                threading.Timer(DURING_S, fault.strike).start()
            elif fault.moment == "torn":
                tear(fault, *args, **kwargs)
            elif fault.moment == "held":
                fault.hold()
            else:
                fault.strike()
        return function(*args, **kwargs)

    return call


class Loader(importlib.abc.Loader):
    """Runs a module, then puts its faults in place."""

    def __init__(self, inner: importlib.abc.Loader, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = faults

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for fault in self._faults:
            *path, name = fault.point.partition(":")[2].split(".")
            holder: Any = module
            for part in path:
                holder = getattr(holder, part)
            setattr(holder, name, wrapped(getattr(holder, name), fault))


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules that hold a point."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        faults = [fault for fault in self._faults if fault.point.partition(":")[0] == name]
        if not faults:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, faults)
        return spec


def install(plan: Path) -> None:
    settings = json.loads(plan.read_text())
    faults = [Fault(plan, settings, place) for place in range(len(settings["faults"]))]
    sys.meta_path.insert(0, Finder(faults))


if named := os.environ.get("AREAL_HPC_FAULTS"):
    install(Path(named))
