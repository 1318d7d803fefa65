"""Threads for native calls that may outlast their process, and the end of a process beside them.

A thread in a call of native code cannot be ended. If the call returns while the interpreter ends,
CPython (before 3.14) ends the thread by unwinding its frames when it takes the interpreter's lock.
C++ forbids that in a destructor, which is where torch's bindings take the lock, and the process
aborts: "terminate called without an active exception", SIGABRT in place of its exit code.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)

_libraries_with_native_threads: set[str] = set()
"""Libraries whose own threads, unknown to Python, may be in native calls."""


class NativeCallThread(threading.Thread):
    """Daemon thread for native code that takes the interpreter's lock in C++.

    A process that ends while it runs ends at once (`exit_beside_native_calls`).
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def start_native_call(work: Callable[[], ResultT], thread_name: str) -> Future[ResultT]:
    """Run `work` in a daemon thread of its own, and return the future of its result."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # boundary: the waiting thread raises it
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    NativeCallThread(run, thread_name).start()
    return future


def note_library_threads(library: str) -> None:
    """Record that a library has threads of its own, until they are marked as ended.

    Gloo's threads release the tensors of an operation some time after it failed, which takes the
    interpreter's lock.
    """
    _libraries_with_native_threads.add(library)


def mark_native_threads_ended(library: str) -> None:
    _libraries_with_native_threads.discard(library)


@contextmanager
def exit_beside_native_calls() -> Iterator[None]:
    """End the process at the end of the block if native calls may be under way; else do nothing.

    What the interpreter's end would run is left out then, but for the flushing of logs.
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            raise
        code = end.code
    except BaseException:  # boundary: reported as the interpreter would do it
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            return
    # Even if they have returned by now the process ends here, as the exception was consumed.
    log.info("the process ends at once, beside native calls: %s", ", ".join(names))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def list_native_calls() -> list[str]:
    """List the native calls under way in this module's threads."""
    threads = threading.enumerate()
    return [thread.name for thread in threads if isinstance(thread, NativeCallThread)]


def list_threaded_libraries() -> list[str]:
    """List the libraries that have threads of their own."""
    return sorted(_libraries_with_native_threads)
