"""Sandboxes of podman, without root, without a daemon and without a registry.

A first set of namespaces (`unshare`) holds a file system in memory whose size and number of files
are limited, and every process of podman's; its end is theirs. Podman runs in it as if it were root
and starts one container from a folder. The channel is a descriptor that the container inherits.
"""

import json
import resource
import shutil
from collections.abc import Iterator, Mapping
from functools import partial

from areal_hpc.sandbox.bubblewrap_command_line import NOBODY_UID
from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.container import (
    ContainerPlan,
    ContainerSetup,
    build_container_command_prefix,
    build_container_server_command,
    build_runtime_program_search_path,
    check_paths,
    list_writable_binds,
    start_container,
)
from areal_hpc.sandbox.runtimes.guest import GUEST_DIR
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.seccomp import build_seccomp_profile
from areal_hpc.sandbox.spec import Network, SandboxSpec

_build_isolation_error = partial(
    build_isolation_error,
    "podman",
    "install podman and crun on every node and allow user namespaces, or set "
    "rollout.agent.isolation=bwrap",
)

_CHANNEL_FD = 3
_PODMAN_FILE_COUNT = 90
_RUN_SCRIPT = """
exec 3<&0 < /dev/null > /dev/null
mount -t tmpfs -o size=1m tmpfs /dev/shm  # where podman keeps locks, for all of its user
# crun knows no version 1 of control groups beside version 2, and is to use none.
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2> /dev/null || :
podman "$@"  # not in place of this shell, which reaps what loses its parent
"""
_CONTAINERS_CONFIG = """
[containers]
default_ulimits = []
log_driver = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
hooks_dir = []
num_locks = 8
runtime = "crun"
tmp_dir = "{scratch}/run"
static_dir = "{scratch}/storage"
volume_path = "{scratch}/storage"
"""
"""In place of the machine's: its mounts and hooks are for others."""
_STORAGE_CONFIG = """
[storage]
driver = "vfs"
graphroot = "{scratch}/storage"
runroot = "{scratch}/run"
"""


class PodmanRuntime:
    name = "podman"
    networks: tuple[Network, ...] = ("none", "session-only", "open")
    supports_root_file_system = True

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if find_podman_with_crun() is None:
            raise _build_isolation_error("the programs podman and crun are not both here")
        return await start_container(spec, _plan_container, _build_isolation_error)


def find_podman_with_crun() -> str | None:
    path = build_runtime_program_search_path()
    return shutil.which("crun", path=path) and shutil.which("podman", path=path)


def _plan_container(setup: ContainerSetup) -> ContainerPlan:
    namespaces = ("--cgroup", "--pid", "--mount-proc", "--fork", "--kill-child")
    command = [
        *build_container_command_prefix(
            setup, namespaces, _RUN_SCRIPT, program_files=_PODMAN_FILE_COUNT
        ),
        *_list_podman_options(setup),
        *("--rootfs", f"{setup.scratch}/rootfs"),
        *build_container_server_command(setup, channel_fd=_CHANNEL_FD),
    ]
    variables, files = _build_podman_variables(setup.scratch), _list_own_files(setup.scratch)
    return ContainerPlan(command, variables, dict(files))


def _build_podman_variables(scratch: str) -> Mapping[str, str]:
    return {
        "HOME": scratch,
        "XDG_RUNTIME_DIR": f"{scratch}/run",
        "CONTAINERS_CONF": f"{scratch}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{scratch}/storage.conf",
        # Podman would make a user namespace that outlives it; this says that it has one.
        "_CONTAINERS_USERNS_CONFIGURED": "done",
    }


def _list_podman_options(setup: ContainerSetup) -> Iterator[str]:
    spec, scratch = setup.spec, setup.scratch
    yield from ("run", "--rm", "--cgroups=disabled", "--cap-drop=all", "--hostname=sandbox")
    yield from ("--security-opt=no-new-privileges", "--security-opt=label=disable")
    yield "--security-opt=mask=/sys"
    if build_seccomp_profile() is not None:
        yield f"--security-opt=seccomp={scratch}/seccomp.json"
    for what in ("uid", "gid"):
        yield f"--{what}map={NOBODY_UID}:0:1"
    yield from (f"--user={NOBODY_UID}:{NOBODY_UID}", "--passwd=false", "--no-hosts", "--workdir=/")
    for name, which in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        most = resource.getrlimit(which)[1]  # by default podman asks for more than it may
        yield f"--ulimit={name}={most}:{most}"
    yield f"--network={'host' if spec.network == 'open' else 'none'}"
    yield f"--preserve-fds={_CHANNEL_FD - 2}"
    yield "--tmpfs=/dev:rw,size=64k,nr_inodes=64,mode=755"
    if spec.root is None:
        yield from ("--read-only", "--read-only-tmpfs=false")
    for source, place, how in _list_binds(setup):
        check_paths("podman", (source, place), ":")
        yield f"--volume={source}:{place}:{how}"


def _list_binds(setup: ContainerSetup) -> Iterator[tuple[str, str, str]]:
    spec, scratch = setup.spec, setup.scratch
    for source, place in list_writable_binds(spec):
        yield f"{scratch}/{source}", place, "rw"
    yield f"{scratch}/guest", GUEST_DIR, "ro"
    for source, place in setup.readonly_binds:
        yield source, place, "ro"
    if spec.root is not None:
        yield f"{scratch}/guest/root", f"{GUEST_DIR}/root", "ro"


def _list_own_files(scratch: str) -> Iterator[tuple[str, bytes]]:
    yield "containers.conf", _CONTAINERS_CONFIG.format(scratch=scratch).encode()
    yield "storage.conf", _STORAGE_CONFIG.format(scratch=scratch).encode()
    yield "seccomp.json", json.dumps(build_seccomp_profile()).encode()
