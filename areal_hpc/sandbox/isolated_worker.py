"""Command line of a worker: third-party code (a gym, a scorer) that reads model output.

A worker has a Python of its own. By default bubblewrap isolates it: it sees the system's programs,
its Python and named folders, all read-only, but no secrets, no files of the user and no other
process, and reaches named hosts only. It runs `worker_loop.py`, which plays each episode in a fork.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.bwrap import (
    build_bwrap_options,
    hold_content_descriptors,
    require_bubblewrap,
)
from areal_hpc.sandbox.guest import (
    GUEST_DIR,
    NOBODY_UID,
    choose_scratch_mount_point,
    find_system_places,
    is_executable_by_all,
    may_become_nobody,
)
from areal_hpc.sandbox.program import build_isolation_error, get_configured_isolation
from areal_hpc.sandbox.seccomp import build_seccomp_filter

WORKER_LOOP_FILE = Path(__file__).parent / "worker" / "worker_loop.py"
_VARIABLES = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PASSED_VARIABLES = ("LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
_LOOPBACK_NAMES = ("127.0.0.1", "localhost")
SCRATCH_BYTES = 64 << 20
PROXY_PORT = 8998
_LIST_FOLDERS_SCRIPT = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path[1:]]))"
)
_RUN_UNISOLATED_SCRIPT = """
import runpy, sys
sys.path[:] = [*sys.path[1:], *sys.argv[3:]]
runpy.run_path(sys.argv[2], run_name="__main__")
"""
"""Script that appends folders to `sys.path`: their files may have names of standard modules."""
_BIND_FOLDERS_SCRIPT = """set -e
scratch=$1 count=$2 user=$3
shift 3
mount -t tmpfs -o mode=755 tmpfs "$scratch"
number=0
while [ $number -lt $count ]; do
  mkdir "$scratch/$number"
  mount --bind "$1" "$scratch/$number"
  number=$((number + 1))
  shift
done
exec setpriv --reuid $user --regid $user --clear-groups "$@"
"""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Limits and rights of a worker's episodes."""

    timeout_s: float | None = None
    """Time limit of one answer; None: the caller ends the worker."""
    memory_bytes: int | None = None
    """Memory of an episode on top of the prepared process's own."""
    ends_with_answer: bool = False
    """Whether an episode consists of one request."""
    hosts: tuple[str, ...] = ()
    """Hosts that it may reach, as `HOST:PORT`, through the proxy that its environment names."""

    @property
    def proxy_port(self) -> int | None:
        return PROXY_PORT if self.hosts and get_configured_isolation() != "none" else None


@contextmanager
def open_worker_command(
    scripts: Sequence[Path],
    settings: WorkerSettings,
    *,
    python: str = sys.executable,
    variables: Mapping[str, str] | None = None,
    readonly_folders: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Build arguments for `subprocess.Popen` that start a worker, with `reward.isolation`.

    Args:
        scripts: The worker's program, and the files beside it.
        settings: Limits and rights of an episode.
        python: The Python that runs it.
        variables: Its environment, beside variables that contain nothing about the user.
        readonly_folders: Folders that it sees beside those that its Python imports from.
    """
    environ = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    environ |= variables or {}
    python = str(Path(shutil.which(python) or python).absolute())
    if path := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = ":".join(str(Path(part).absolute()) for part in path.split(":"))
    request = asdict(settings) | {
        "is_first_process": get_configured_isolation() != "none",
        "proxy_port": settings.proxy_port,
    }
    if not request["is_first_process"]:
        script_folders = [str(script.parent) for script in (*scripts, WORKER_LOOP_FILE)]
        environ |= {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        program = [python, "-c", _RUN_UNISOLATED_SCRIPT, json.dumps(request)]
        yield {"args": [*program, str(scripts[0]), *script_folders], "env": environ}
        return
    as_nobody = may_become_nobody()
    bwrap = require_bubblewrap(build_isolation_error)
    named_folders = [*filter(None, environ.get("PYTHONPATH", "").split(":")), *readonly_folders]
    _check_named_folders(named_folders)
    folders = [*_list_python_folders(python), *named_folders]
    if settings.hosts:
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        environ |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
        named_hosts = {host.rpartition(":")[0] for host in settings.hosts}
        direct = ",".join(name for name in _LOOPBACK_NAMES if name not in named_hosts)
        environ = {"NO_PROXY": direct, "no_proxy": direct} | environ
        folders += ["/etc/ssl", "/etc/pki"]
    folders = _list_top_folders(folders)
    for name in _CERTIFICATE_VARIABLES:  # clients fail if they name a missing file
        path = os.environ.get(name, "")
        if any(Path(path).is_relative_to(folder) for folder in ("/usr", *folders)):
            environ.setdefault(name, path)
    with hold_content_descriptors() as contents:
        sources, prefix = folders, list[str]()
        if as_nobody and not all(is_executable_by_all(Path(folder)) for folder in folders):
            # Root's own folders, such as its Python, are mounted where user 65534 can reach them.
            scratch = choose_scratch_mount_point([str(bwrap), *folders])
            sources = [f"{scratch}/{number}" for number in range(len(folders))]
            prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
            prefix += [_BIND_FOLDERS_SCRIPT, "sh"]
            prefix += [scratch, str(len(folders)), str(NOBODY_UID), *folders]
        (system, links), writable = find_system_places(), list[str]()
        for name, value in (_VARIABLES | environ).items():
            writable += ["--setenv", name, value]
        for folder in ("/dev/shm", "/tmp"):
            writable += ["--size", str(SCRATCH_BYTES), "--perms", "1777", "--tmpfs", folder]
        files = (*scripts, WORKER_LOOP_FILE)
        options = build_bwrap_options(
            contents,
            writable=writable,
            readonly=[*system, *zip(sources, folders, strict=True)],
            links=links,
            files={f"{GUEST_DIR}/{file.name}": file.read_bytes() for file in files},
            working_dir="/tmp",
        )
        if (program_filter := build_seccomp_filter()) is not None:
            options += ["--seccomp", contents.add(program_filter)]
        program = [python, f"{GUEST_DIR}/{scripts[0].name}", json.dumps(request)]
        user_arguments = {"user": NOBODY_UID, "group": NOBODY_UID, "extra_groups": list[int]()}
        yield {
            "args": [*prefix, str(bwrap), *options, "--", *program],
            "env": _VARIABLES,
            "cwd": "/",
            "pass_fds": contents.descriptors,
            **(user_arguments if as_nobody and not prefix else {}),
        }


@functools.lru_cache
def _list_python_folders(python: str) -> tuple[str, ...]:
    if python == sys.executable:  # its other import paths lead to the project's folder
        return (sys.prefix, sys.base_prefix)
    result = subprocess.run([python, "-c", _LIST_FOLDERS_SCRIPT], capture_output=True, check=False)
    if result.returncode != 0:
        raise RecipeError(f"{python} does not run: {result.stderr.decode(errors='replace')[-300:]}")
    return tuple(json.loads(result.stdout))


def _check_named_folders(folders: Sequence[str]) -> None:
    for folder in folders:
        path, fault = Path(folder).absolute(), ""
        if not path.is_dir():
            fault = "is no folder of this node"
        elif Path.home().is_relative_to(path):
            fault = "holds your home directory"
        if fault:
            raise RecipeError(
                f"{path} cannot be shown to an isolated program: it {fault}",
                key="rollout.workflow_kwargs",
                hint="name folders that every node has in `readonly_folders`, and in PYTHONPATH "
                "of `variables`",
            )


def _list_top_folders(folders: Sequence[str]) -> list[str]:
    home = Path.home()
    top_folders = list[str]()
    for folder in sorted({str(Path(folder).absolute()) for folder in folders}):
        is_within = any(Path(folder).is_relative_to(top) for top in ("/usr", *top_folders))
        if Path(folder).is_dir() and not is_within and not home.is_relative_to(folder):
            top_folders.append(folder)
    return top_folders
