"""Judge of a repair task, copied into its tests: `judge.py MODULE`, standard library alone.

The module runs in a process of its own, which is given calls one by one and gives values back. What
is expected is in this process alone: its file is removed before the module is imported, and other
processes cannot read its memory. The verdict is written after all that the module started is dead.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES_FILE = Path("/tests/cases.json")
VERDICT_FILE = Path("/logs/verifier/reward.txt")
MODULE_CALL_TIMEOUT_S = 10
MAX_PRINTED_BYTES = 1 << 20
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CALL_PROGRAM_SOURCE = """
import importlib, json, sys
folder, name, function, arguments = json.load(sys.stdin)
sys.path.insert(0, folder)
value = getattr(importlib.import_module(name), function)(*arguments)
sys.__stdout__.write("\\n" + json.dumps([value]))
sys.__stdout__.flush()
"""


def read_and_remove_cases_file() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(CASES_FILE.read_text())
    CASES_FILE.unlink()
    return cases


def run_case_and_compare(folder: str, module: str, case: dict[str, Any]) -> bool:
    request = json.dumps([folder, module, case["function"], case["arguments"]])
    with tempfile.TemporaryFile() as printed:  # of a pipe the end may never come
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", CALL_PROGRAM_SOURCE],
                input=request.encode(),
                stdout=printed,
                stderr=subprocess.DEVNULL,
                timeout=MODULE_CALL_TIMEOUT_S,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            kill_all_descendants()
        printed.seek(0)
        try:
            answer = json.loads(printed.read(MAX_PRINTED_BYTES).splitlines()[-1])
        except (ValueError, IndexError, RecursionError):
            return False
    return bool(answer == [case["expected"]])


def kill_all_descendants() -> None:
    """Kill all started processes, also those that left the session: orphans become this one's."""
    while True:
        below = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not below:
            return
        for pid in map(int, below):
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except OSError:
                pass


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    module = Path(sys.argv[1])
    right = all(
        run_case_and_compare(str(module.parent), module.name, case)
        for case in read_and_remove_cases_file()
    )
    # A folder of its own for the verdict: the module may have written any file into the one there.
    if os.path.lexists(VERDICT_FILE.parent):
        VERDICT_FILE.parent.rename(f"{VERDICT_FILE.parent}-{os.urandom(8).hex()}")
    VERDICT_FILE.parent.mkdir(parents=True)
    with VERDICT_FILE.open("x") as file:
        file.write("1.0" if right else "0.0")


if __name__ == "__main__":
    main()
