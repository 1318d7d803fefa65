"""Sandboxes of enroot, which clusters have for their containers.

enroot gives a process another root and takes its rights away. What else isolates is made here, by
`unshare` and mounts before it and by a filter of system calls after it. Of the machine's own
configuration of enroot no mount, hook or variable is used.
"""

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.container import (
    ContainerPlan,
    ContainerSetup,
    build_container_server_command,
    build_nobody_container_command_prefix,
    build_runtime_program_search_path,
    list_writable_binds,
    start_container,
)
from areal_hpc.sandbox.runtimes.guest import GUEST_DIR
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.spec import Network, SandboxSpec

_build_isolation_error = partial(
    build_isolation_error,
    "enroot",
    "install enroot on every node and allow user namespaces, or set rollout.agent.isolation=bwrap",
)

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


class EnrootRuntime:
    """Sandboxes of enroot. A root file system needs a shell, by which enroot starts programs."""

    name = "enroot"
    networks: tuple[Network, ...] = ("none", "session-only", "open")
    supports_root_file_system = True

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if find_enroot() is None:
            raise _build_isolation_error("there is no program enroot")
        return await start_container(spec, _plan_container, _build_isolation_error)


def find_enroot() -> str | None:
    return shutil.which("enroot", path=build_runtime_program_search_path())


def _plan_container(setup: ContainerSetup) -> ContainerPlan:
    namespaces = ("--pid", "--mount-proc", "--fork", "--kill-child")
    command = [
        *build_nobody_container_command_prefix(setup, namespaces),
        # With a space in it this is what a shell is given, else a binary is taken for a script.
        *("enroot", "start", "rootfs", 'exec "$@"'),
        *build_container_server_command(setup, filters_calls=True),
    ]
    mounts = "".join(f"{line}\n" for line in _list_mounts(setup))
    links = {f"dev/{name}": target for name, target in _DEVICE_LINKS.items()}
    files = {"enroot/mounts.d/all.fstab": mounts.encode()}
    return ContainerPlan(command, _build_enroot_variables(setup), files, links)


def _build_enroot_variables(setup: ContainerSetup) -> Mapping[str, str]:
    scratch = setup.scratch
    return {
        "HOME": scratch,
        "SHELL": "/bin/sh",
        "TMPDIR": f"{scratch}/run",
        "ENROOT_SYSCONF_PATH": f"{scratch}/enroot",
        "ENROOT_CONFIG_PATH": f"{scratch}/enroot/none",
        "ENROOT_CACHE_PATH": f"{scratch}/storage",
        "ENROOT_TEMP_PATH": f"{scratch}/run",
        "ENROOT_RUNTIME_PATH": f"{scratch}/run",
        "ENROOT_DATA_PATH": scratch,
        "ENROOT_LOGIN_SHELL": "no",
        "ENROOT_MOUNT_HOME": "no",
        "ENROOT_REMAP_ROOT": "no",
        "ENROOT_ALLOW_SUPERUSER": "no",
        "ENROOT_ROOTFS_WRITABLE": "no" if setup.spec.root is None else "yes",
    }


def _list_mounts(setup: ContainerSetup) -> Iterator[str]:
    spec, scratch = setup.spec, setup.scratch
    yield "/proc /proc none x-create=dir,rbind,rw,nosuid,nodev,noexec"
    yield f"{scratch}/dev /dev none x-create=dir,bind,rw,nosuid,noexec"
    for name in _DEVICES:
        yield f"/dev/{name} /dev/{name} none x-create=file,bind,rw,nosuid,noexec"
    yield (
        "devpts /dev/pts devpts x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620"
    )
    for source, place in list_writable_binds(spec):
        yield f"{scratch}/{source} {_escape(place)} none x-create=dir,bind,rw,nosuid,nodev"
    yield "none /dev none remount,bind,ro,nosuid,noexec"
    yield f"{scratch}/guest {GUEST_DIR} none x-create=dir,rbind,ro,nosuid,nodev"
    for source, place in setup.readonly_binds:
        how = "bind" if Path(source).is_file() else "rbind"
        yield f"{_escape(source)} {_escape(place)} none {how},ro,nosuid,nodev"
    if spec.network == "open" and Path("/etc/resolv.conf").exists():
        yield "/etc/resolv.conf /etc/resolv.conf none x-create=file,bind,ro,nosuid,nodev"


def _escape(path: str) -> str:
    return "".join(f"\\{ord(one):03o}" if one in " \t\n\\$" else one for one in path)
