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
from areal_hpc.sandbox.runtimes.guest_environment import (
    GUEST_ETC_FILES,
    GUEST_VARIABLES,
    WORK_DIR,
)
from areal_hpc.sandbox.runtimes.guest_python import (
    GUEST_DIR,
    SERVER_SCRIPTS,
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
    mounts = [
        *_list_kernel_mounts(),
        *_list_guest_mounts(python),
        *_link_and_list_system_mounts(bundle / "rootfs"),
    ]
    mounts += [
        _build_readonly_bind_mount(f"{bundle}/files/{name}", f"/etc/{name}")
        for name in GUEST_ETC_FILES
    ]
    writable = [WORK_DIR, "/tmp"]
    mounts += [_build_tmpfs_mount(place, spec.limits.disk_bytes) for place in writable]
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


def _list_kernel_mounts() -> Iterator[dict[str, Any]]:
    yield {"destination": "/proc", "type": "proc", "source": "proc"}
    yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}


def _list_guest_mounts(python: GuestPython) -> Iterator[dict[str, Any]]:
    for source, place in python.binds:
        yield _build_readonly_bind_mount(source, place)
    for script in SERVER_SCRIPTS:
        yield _build_readonly_bind_mount(str(script), f"{GUEST_DIR}/{script.name}")


def _link_and_list_system_mounts(rootfs: Path) -> Iterator[dict[str, Any]]:
    yield _build_readonly_bind_mount("/usr", "/usr")
    for path in map(Path, SYSTEM_LINKS):
        if path.is_symlink():
            (rootfs / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            yield _build_readonly_bind_mount(str(path), str(path))
    for name in SYSTEM_FILES:
        if Path(name).exists():
            yield _build_readonly_bind_mount(os.path.realpath(name), name)


def _build_readonly_bind_mount(host_path: str, mount_path: str) -> dict[str, Any]:
    return {
        "destination": mount_path,
        "type": "bind",
        "source": host_path,
        "options": ["bind", "ro"],
    }


def _build_tmpfs_mount(mount_path: str, size_bytes: int) -> dict[str, Any]:
    options = [f"size={size_bytes}", "mode=1777"]
    return {"destination": mount_path, "type": "tmpfs", "source": "tmpfs", "options": options}
