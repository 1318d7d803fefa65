"""Sandboxes of podman, without root, without a daemon and without a registry.

A first set of namespaces (`unshare`) holds a file system in memory whose size and number of files
are limited, and every process of podman's; its end is theirs. Podman runs in it as if it were root
and starts one container from a folder. The channel is a descriptor that the container inherits.
"""

import io
import json
import os
import resource
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.sandbox.bubblewrap import (
    NOBODY_UID,
    SYSTEM_FILES,
    SYSTEM_LINKS,
    may_become_nobody,
)
from areal_hpc.sandbox.images.root_archive import unpack_root_if_archive
from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.guest_python import (
    GUEST_DIR,
    SCRIPTS,
    GuestPython,
    build_server_command,
    find_guest_python,
)
from areal_hpc.sandbox.runtimes.scratch import choose_scratch_dir
from areal_hpc.sandbox.runtimes.system_view import GUEST_ACCOUNT_FILES, GUEST_VARIABLES, WORK_DIR
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.seccomp import build_seccomp_profile
from areal_hpc.sandbox.spec import Network, SandboxSpec

_build_isolation_error = partial(
    build_isolation_error,
    "podman",
    "install podman and crun on every node and allow user namespaces, or set "
    "rollout.agent.isolation=bwrap",
)

_PROGRAM_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHANNEL_FD = 3
_PODMAN_SCRATCH_BYTES, _PODMAN_SCRATCH_FILES = 1 << 20, 150
"""What podman keeps beside the files of a sandbox."""
_PREPARE_AND_RUN_SCRIPT = """
set -e
exec 3<&0 < /dev/null > /dev/null
mount -t tmpfs -o size="$2",nr_inodes="$3",mode=755 tmpfs "$1"
tar --extract --file "/proc/self/fd/$4" --directory "$1" --same-permissions --no-same-owner
mount -t tmpfs -o size=1m tmpfs /dev/shm  # where podman keeps locks, for all of its user
# crun knows no version 1 of control groups beside version 2, and is to use none.
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2> /dev/null || :
if [ -n "$5" ]; then
  mount --bind "$5" "$1/guest/root"
  mount -t overlay overlay "$1/rootfs" -o \
"lowerdir=$1/places:$1/guest/root,upperdir=$1/upper,workdir=$1/work,userxattr"
fi
shift 5
while [ "$1" != run ]; do mount -o remount,bind,ro "$1"; shift; done
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
    """Sandboxes of podman."""

    name = "podman"
    networks: tuple[Network, ...] = ("none", "session-only", "open")
    takes_root = True

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """See `Runtime.start`."""
        as_nobody = may_become_nobody()
        if find_podman() is None:
            raise _build_isolation_error("the programs podman and crun are not both here")
        spec = await unpack_root_if_archive(spec, NOBODY_UID if as_nobody else None)
        python = find_guest_python(by_anybody=as_nobody)
        binds = [*_list_binds(spec, python)]
        scratch = choose_scratch_dir([str(spec.root or ""), *(source for source, _ in binds)])
        archive = os.memfd_create("sandbox")
        try:
            with open(archive, "wb", closefd=False) as file:
                file.write(_build_scratch_archive(spec, python, scratch))
            plan = SandboxStartPlan(
                _build_command(spec, python, scratch, archive, binds),
                WORK_DIR,
                spec.limits,
                {**GUEST_VARIABLES, **spec.variables},
                pass_fds=[archive],
                user=NOBODY_UID if as_nobody else None,
                environ=_build_podman_variables(scratch),
            )
            return await Sandbox.start(plan)
        except ClusterError as error:
            if not isinstance(error.__cause__, EOFError):  # too slow, or no process could be made
                raise
            raise _build_isolation_error(error.problems[0].message) from error
        finally:
            os.close(archive)


def find_podman() -> str | None:
    """The program `podman`, where crun is too: runc cannot do without control groups."""
    path = f"{os.environ.get('PATH', '')}:{_PROGRAM_SEARCH_PATH}"
    return shutil.which("crun", path=path) and shutil.which("podman", path=path)


def _build_podman_variables(scratch: str) -> Mapping[str, str]:
    return {
        "PATH": f"{os.environ.get('PATH', '')}:{_PROGRAM_SEARCH_PATH}",
        "HOME": scratch,
        "XDG_RUNTIME_DIR": f"{scratch}/run",
        "CONTAINERS_CONF": f"{scratch}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{scratch}/storage.conf",
        # Podman would make a user namespace that outlives it; this says that it has one.
        "_CONTAINERS_USERNS_CONFIGURED": "done",
    }


def _build_command(
    spec: SandboxSpec,
    python: GuestPython,
    scratch: str,
    archive: int,
    binds: Sequence[tuple[str, str]],
) -> list[str]:
    """From `unshare` on to the server's own command line."""
    size = spec.limits.disk_bytes + _PODMAN_SCRATCH_BYTES
    writable = ["/"] if spec.root is not None else [WORK_DIR, "/tmp", *spec.folders]
    server = build_server_command(
        spec,
        python.command,
        f"{GUEST_DIR}/{SCRIPTS[0].name}",
        writable=writable,
        counts_processes=True,
        channel_fd=_CHANNEL_FD,
    )
    namespaces = ("--user", "--map-root-user", "--mount", "--cgroup", "--pid", "--mount-proc")
    return [
        *("unshare", *namespaces, "--fork", "--kill-child"),
        *("sh", "-c", _PREPARE_AND_RUN_SCRIPT, "sh", scratch, str(size)),
        *(str(spec.limits.files + _PODMAN_SCRATCH_FILES), str(archive), str(spec.root or "")),
        *_list_mounts_below([source for source, _ in binds]),
        *_list_podman_options(spec, scratch, binds),
        *("--rootfs", f"{scratch}/rootfs", *server),
    ]


def _list_podman_options(
    spec: SandboxSpec, scratch: str, binds: Sequence[tuple[str, str]]
) -> Iterator[str]:
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
    for source, place in (("shm", "/dev/shm"), *_list_writable_places(spec)):
        yield f"--volume={scratch}/{source}:{place}:rw"
    yield f"--volume={scratch}/guest:{GUEST_DIR}:ro"
    for source, place in binds:
        yield f"--volume={source}:{place}:ro"
    if spec.root is not None:
        yield f"--volume={scratch}/guest/root:{GUEST_DIR}/root:ro"


def _list_writable_places(spec: SandboxSpec) -> Iterator[tuple[str, str]]:
    """Names below the scratch folder, and their places, where the root is read-only."""
    if spec.root is None:
        yield from (("workspace", WORK_DIR), ("tmp", "/tmp"))
        for number, folder in enumerate(spec.folders):
            yield f"folder{number}", folder


def _list_binds(spec: SandboxSpec, python: GuestPython) -> Iterator[tuple[str, str]]:
    """What a sandbox shows of this machine, read-only, and where."""
    yield from python.binds
    for folder in spec.readonly_folders:
        yield folder, folder
    if spec.root is not None:
        return
    yield "/usr", "/usr"
    shared = ("/etc/ssl", "/etc/pki") if spec.network == "open" else ()
    for name in (*SYSTEM_LINKS, *SYSTEM_FILES, *shared):
        if Path(name).exists() and not (name in SYSTEM_LINKS and Path(name).is_symlink()):
            yield os.path.realpath(name), name


def _list_mounts_below(sources: Sequence[str]) -> Iterator[str]:
    """Mounts within folders that are shown: each of them has to be made read-only by itself."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        place = Path(line.split()[4].decode("unicode_escape"))
        if any(str(place) != one and place.is_relative_to(one) for one in sources):
            yield str(place)


def _build_scratch_archive(spec: SandboxSpec, python: GuestPython, scratch: str) -> bytes:
    """A tar of what the scratch folder holds at first."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("rootfs", "upper", "work", "guest", "guest/root", "places", "storage", "run"):
            _add_member(archive, name, mode=0o755)
        for name in ("shm", "tmp", "workspace", *(f"folder{n}" for n in range(len(spec.folders)))):
            _add_member(archive, name, mode=0o1777)
        for place in (GUEST_DIR, WORK_DIR, "/tmp", *spec.folders):
            _add_member(archive, f"places{place}", mode=0o1777)
        for source, place in python.binds:
            is_file = Path(source).is_file()
            _add_member(archive, place.replace(GUEST_DIR, "guest", 1), b"" if is_file else None)
        for path in map(Path, SYSTEM_LINKS if spec.root is None else ()):
            if path.is_symlink():
                _add_member(archive, f"rootfs{path}", target=str(path.readlink()))
        for name, content in _list_scratch_files(spec, scratch):
            _add_member(archive, name, content)
    return stream.getvalue()


def _list_scratch_files(spec: SandboxSpec, scratch: str) -> Iterator[tuple[str, bytes]]:
    yield "containers.conf", _CONTAINERS_CONFIG.format(scratch=scratch).encode()
    yield "storage.conf", _STORAGE_CONFIG.format(scratch=scratch).encode()
    yield "seccomp.json", json.dumps(build_seccomp_profile()).encode()
    for script in SCRIPTS:
        yield f"guest/{script.name}", script.read_bytes()
    for name, content in GUEST_ACCOUNT_FILES.items() if spec.root is None else ():
        yield f"rootfs/etc/{name}", content.encode()


def _add_member(
    archive: tarfile.TarFile,
    name: str,
    content: bytes | None = None,
    *,
    mode: int = 0o755,
    target: str = "",
) -> None:
    """Add a file, a link, or a folder if it has neither content nor target."""
    member = tarfile.TarInfo(name)
    member.mode = mode if content is None else 0o644
    member.type = tarfile.SYMTYPE if target else tarfile.DIRTYPE
    member.linkname = target
    if content is not None:
        member.type, member.size = tarfile.REGTYPE, len(content)
    archive.addfile(member, io.BytesIO(content or b""))
