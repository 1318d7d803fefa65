"""Workers forked after the collection of tests, so that modules are imported once.

With pytest-xdist each worker imports and collects all, a tenth of a whole run.
"""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import pytest

from tests.support.file_durations import get_group

FORK = multiprocessing.get_context("fork")
WORKER_VARIABLE = "TESTS_WORKER"
"""Set in workers."""
MAX_SILENT_S = 1200.0
"""Time limit of a silent worker: a test's own ends none that holds the interpreter's lock in C."""
Group = list[int]
"""Positions of tests in the session, one behind the other."""


@dataclass
class Worker:
    process: BaseProcess
    test: str = ""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """The worker knows that no group is left."""


class ForkedWorkers:
    def __init__(self, count: int, *of_parent: object) -> None:
        """Take further plugins that are the parent's alone."""
        self.is_cut_off = False
        """A worker died, and the rest of its group did not run."""
        self._count = count
        self._of_parent = (self, *of_parent)
        self._workers: dict[Connection, Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # as pytest does it
        config: Any = session.config
        config.pluginmanager.getplugin("terminalreporter").showfspath = False
        config._tmp_path_factory.getbasetemp()  # its folder holds those of workers
        groups = iter(_list_groups(session))
        gc.collect()
        gc.freeze()
        try:
            for number in range(self._count):
                self._start(session, f"w{number}")
            while self._workers:
                self._abort_silent_workers()
                for connection in wait([*self._workers], timeout=30.0):
                    assert isinstance(connection, Connection)
                    self._hear(session, connection, groups)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
        finally:
            for connection, worker in self._workers.items():
                connection.close()  # which ends it
                worker.process.join()
        return True

    def _abort_silent_workers(self) -> None:
        """End them with the stacks of their threads, which faulthandler writes."""
        for worker in self._workers.values():
            if time.monotonic() - worker.heard_at > MAX_SILENT_S and worker.process.pid:
                os.kill(worker.process.pid, signal.SIGABRT)

    def _start(self, session: pytest.Session, name: str) -> None:
        ours, theirs = FORK.Pipe()
        words = (session, self._of_parent, name, theirs, [*self._workers, ours])
        process = FORK.Process(target=_work, args=words)
        process.start()
        theirs.close()
        self._workers[ours] = Worker(process)

    def _hear(
        self, session: pytest.Session, connection: Connection, groups: Iterator[Group]
    ) -> None:
        worker = self._workers[connection]
        worker.heard_at = time.monotonic()
        try:
            what, data = connection.recv()
        except EOFError:
            del self._workers[connection]
            connection.close()
            worker.process.join()
            if worker.process.exitcode or not worker.is_done:
                self.is_cut_off = True
                session.testsfailed += 1
                print(f"\nFAILED {worker.test}: its worker died", flush=True)
            return
        if what == "began":
            worker.test = data
        elif what == "report":
            hook = session.config.hook
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        else:
            group = next(groups, [])
            worker.is_done = not group
            connection.send(group)


def _list_groups(session: pytest.Session) -> list[Group]:
    positions = range(len(session.items))
    by_name = groupby(positions, lambda position: get_group(session.items[position].nodeid))
    return [[*group] for _, group in by_name]


class _Reporter:
    """Reporter in a worker; it sends to the parent, in place of the terminal."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._tw = config.get_terminal_writer()  # pytest-timeout writes stacks there
        self._config = config
        self._connection = connection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._connection.send(("began", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def ask_group(self) -> Group:
        self._connection.send(("next", None))
        group: Group = self._connection.recv()
        return group


def _work(
    session: pytest.Session,
    of_parent: Sequence[object],
    name: str,
    connection: Connection,
    others: Sequence[Connection],
) -> None:
    for other in others:
        other.close()  # so that the end of the parent is heard
    os.environ[WORKER_VARIABLE] = name
    sys.modules["__main__"] = ModuleType("__main__")  # processes of a fork server import it
    config: Any = session.config
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / name
    factory._basetemp.mkdir(mode=0o700)
    plugins = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    reporter = _Reporter(config, connection)
    for plugin in (*of_parent, plugins.getplugin("terminalreporter")):
        plugins.unregister(plugin)
    plugins.register(reporter, "terminalreporter")
    try:
        group = reporter.ask_group()
        while group:
            following: Group = []
            for index, position in enumerate(group):
                if index == len(group) - 1:
                    following = reporter.ask_group()
                ahead = [*group[index + 1 :], *following][:1]
                upcoming = session.items[ahead[0]] if ahead else None
                item = session.items[position]
                config.hook.pytest_runtest_protocol(item=item, nextitem=upcoming)
            group = following
    finally:
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
