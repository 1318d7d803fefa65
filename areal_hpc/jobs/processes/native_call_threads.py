"""Native calls that may outlast their process: threads for them, and an end beside them.

Nothing ends a thread that is in a call of native code. If the call returns while the interpreter
ends, CPython (before 3.14) ends the thread, by unwinding its frames, as it asks for the
interpreter's lock. C++ forbids that in a destructor, which is where torch's bindings ask for it,
and the process aborts: "terminate called without an active exception", SIGABRT in place of its
exit code.
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
"""Those whose own threads may be in native calls, unknown to Python."""


class NativeCallThread(threading.Thread):
    """Daemon thread whose work is in native code that asks for the interpreter's lock in C++.

    A process that ends while it runs ends at once (`exit_beside_native_calls`).
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def start_native_call(work: Callable[[], ResultT], thread_name: str) -> Future[ResultT]:
    """Run `work` in a daemon thread of its own; its result, if it comes to that."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # boundary: carried to the thread that waits, if it does
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    NativeCallThread(run, thread_name).start()
    return future


def note_library_threads(library: str) -> None:
    """A library has threads of its own, until they are known to have ended: what fails leaves them.

    Gloo's drop the tensors of an operation some time after it failed, and those ask for the
    interpreter's lock.
    """
    _libraries_with_native_threads.add(library)


def mark_native_threads_ended(library: str) -> None:
    _libraries_with_native_threads.discard(library)


@contextmanager
def exit_beside_native_calls() -> Iterator[None]:
    """End the process where the block ends, if native calls may be under way; else do nothing.

    What the interpreter's end would run is left out then, but for the flushing of logs.
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            raise
        code = end.code
    except BaseException:  # boundary: told as the interpreter would, which does not come to it
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        if not (names := [*list_native_calls(), *list_threaded_libraries()]):
            return
    # They may have returned by now: the exception is taken, so the process ends here all the same.
    log.info("the process ends at once, beside native calls: %s", ", ".join(names))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def list_native_calls() -> list[str]:
    """Names of those under way in threads that this module knows."""
    return [one.name for one in threading.enumerate() if isinstance(one, NativeCallThread)]


def list_threaded_libraries() -> list[str]:
    """Libraries that have threads of their own."""
    return sorted(_libraries_with_native_threads)
