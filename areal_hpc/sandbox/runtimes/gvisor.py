"""Sandboxes of gVisor, whose kernel is a program of its own: `runsc --rootless`, without root.

Files that a sandbox writes lie in the memory of that kernel, and count as memory.
"""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError
from areal_hpc.sandbox.bubblewrap_command_line import (
    NOBODY_UID,
    SYSTEM_FILES,
    SYSTEM_LINKS,
    may_become_nobody,
)
from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.guest import (
    GUEST_DIR,
    GUEST_ETC_FILES,
    GUEST_VARIABLES,
    SERVER_SCRIPTS,
    WORK_DIR,
    GuestPython,
    build_command_server_command,
    find_guest_python,
)
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import Network, SandboxSpec

_build_isolation_error = functools.partial(
    build_isolation_error,
    "gVisor",
    "install runsc on every node, or set rollout.agent.isolation=bwrap",
)

_RUNSC_SEARCH_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class GvisorRuntime:
    """Sandboxes of gVisor, which show this machine's programs.

    Its network stack hands no socket out, so there is no session.
    """

    name = "gvisor"
    networks: tuple[Network, ...] = ("none",)
    supports_root_file_system = False

    async def start(self, spec: SandboxSpec) -> Sandbox:
        runsc, as_nobody = find_runsc(), may_become_nobody()
        if runsc is None:
            raise _build_isolation_error("there is no gVisor (the program runsc)")
        python = find_guest_python(by_anybody=as_nobody)
        bundle = Path(tempfile.mkdtemp(prefix="areal-hpc-gvisor-"))
        write_oci_bundle(bundle, spec, python, as_nobody)
        options = ("--rootless", "--network=none", "--ignore-cgroups", "--root", f"{bundle}/state")
        words = ("run", "--bundle", str(bundle), bundle.name)
        plan = SandboxStartPlan(
            [runsc, *options, *words],
            WORK_DIR,
            spec.limits,
            GUEST_VARIABLES,
            user=NOBODY_UID if as_nobody else None,
            counts_memfd_memory=True,
            on_stop=functools.partial(shutil.rmtree, bundle, ignore_errors=True),
        )
        try:
            return await Sandbox.start(plan)
        except ClusterError as error:
            if not isinstance(error.__cause__, EOFError):  # too slow, or no process could be made
                raise
            raise _build_isolation_error(error.problems[0].message) from error


def find_runsc() -> str | None:
    return shutil.which("runsc", path=f"{os.environ.get('PATH', '')}:{_RUNSC_SEARCH_PATH}")


def write_oci_bundle(bundle: Path, spec: SandboxSpec, python: GuestPython, as_nobody: bool) -> None:
    """Fill the folder from which a container of the Open Container Initiative (OCI) starts."""
    for name in ("rootfs", "state", "files"):
        (bundle / name).mkdir()
    for name, content in GUEST_ETC_FILES.items():
        (bundle / "files" / name).write_text(content)
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    ]
    writable = [WORK_DIR, "/tmp"]
    mounts += [
        {
            "destination": place,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": [f"size={spec.limits.disk_bytes}", "mode=1777"],
        }
        for place in writable
    ]
    binds = [
        *python.binds,
        *((str(script), f"{GUEST_DIR}/{script.name}") for script in SERVER_SCRIPTS),
        *_list_system_binds(bundle / "rootfs"),
        *((f"{bundle}/files/{name}", f"/etc/{name}") for name in GUEST_ETC_FILES),
    ]
    mounts += [
        {"destination": place, "type": "bind", "source": source, "options": ["bind", "ro"]}
        for source, place in binds
    ]
    server = build_command_server_command(
        spec,
        python.command,
        f"{GUEST_DIR}/{SERVER_SCRIPTS[0].name}",
        writable_folders=writable,
        counts_processes=True,
    )
    config = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": NOBODY_UID, "gid": NOBODY_UID},
            "args": server,
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": one} for one in ("pid", "network", "ipc", "uts", "mount")]
        },
    }
    (bundle / "config.json").write_text(json.dumps(config))
    for path in (bundle / "rootfs", bundle / "files", *(bundle / "files").iterdir()):
        path.chmod(0o755)  # whatever the umask: its user within the sandbox is not their owner
    if as_nobody:
        for path in (bundle, *bundle.rglob("*")):
            os.chown(path, NOBODY_UID, NOBODY_UID, follow_symlinks=False)


def _list_system_binds(rootfs: Path) -> Iterator[tuple[str, str]]:
    yield "/usr", "/usr"
    for path in map(Path, SYSTEM_LINKS):
        if path.is_symlink():
            (rootfs / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            yield str(path), str(path)
    for name in SYSTEM_FILES:
        if Path(name).exists():
            yield os.path.realpath(name), name
