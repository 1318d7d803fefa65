"""Sandboxes whose namespaces a container program makes: podman, Apptainer, enroot.

A first set of namespaces (`unshare`), in which the caller is root, mounts over the scratch folder
a file system in memory with limits on its size and its number of files. It holds `rootfs`, the
folders shown in it (`guest`, `dev`), the folders that commands may write (`workspace`, `tmp`,
`shm`, one for each further folder), and the layers over a given root file system (`lower`):
`places`, `upper`, `work`. The program starts one container from it, without the mounts, hooks and
variables of the machine's own configuration. The command server installs the seccomp filter.

podman runs as root of these namespaces. Apptainer and enroot isolate less, so `unshare` makes the
network namespace and switches to user 65534 before them.
"""

import io
import os
import resource
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.guest import (
    GUEST_DIR,
    ISOLATION_RECIPE_KEY,
    NOBODY_UID,
    WORK_DIR,
    Guest,
    build_isolation_error,
    build_kernel_limits_script,
    require_python,
)
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec

_PROGRAM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders of container programs, beside those of `PATH`."""
_OTHER_SCRATCH_BYTES, _OTHER_SCRATCH_FILES = 1 << 20, 60
"""Room in the scratch folder beside the files of a sandbox, for every program."""
_PODMAN_SCRATCH_FILES = 90
"""Files that podman itself makes in the scratch folder."""
_PREPARE_SCRIPT = """
set -e
mount -t tmpfs -o size="$2",nr_inodes="$3",mode=755 tmpfs "$1"
tar --extract --file "/proc/self/fd/$4" --directory "$1" --same-permissions --no-same-owner
if [ -n "$5" ]; then
  mount --bind "$5" "$1/lower"
  mount -t overlay overlay "$1/rootfs" -o \
"lowerdir=$1/places:$1/lower,upperdir=$1/upper,workdir=$1/work,userxattr"
fi
shift 5
while [ "$1" != -- ]; do mount -o remount,bind,ro "$1"; shift; done
shift
"""
_BECOME_USER_SCRIPT = """
[ -z "$1" ] || "$1" -I -S -c "$2"
hostname sandbox 2> /dev/null || :
shift 2
exec unshare "$@"
"""
_LOOPBACK_UP_PROGRAM = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh22x", b"lo", 1))
"""
"""SIOCSIFFLAGS with IFF_UP (netdevice(7))."""
_PODMAN_CHANNEL_FD = 3
_RUN_PODMAN_SCRIPT = """
exec 3<&0 < /dev/null > /dev/null
mount -t tmpfs -o size=1m tmpfs /dev/shm  # else podman shares its locks with the user's other ones
# crun supports no version 1 of control groups beside version 2, and must use neither.
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2> /dev/null || :
podman "$@"  # no `exec`: this shell reaps orphans
"""
_PODMAN_FILES = {
    "containers.conf": """
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
""",
    "storage.conf": """
[storage]
driver = "vfs"
graphroot = "{scratch}/storage"
runroot = "{scratch}/run"
""",
}
"""Configuration in place of the machine's, whose mounts and hooks do not fit a sandbox."""
_ENROOT_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ENROOT_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


@dataclass(frozen=True, slots=True)
class ContainerProgram:
    """Container program, and the command line that starts a sandbox in it."""

    title: str
    programs: tuple[tuple[str, ...], ...]
    """Programs that must be installed, each by one of its names; the last starts the container."""
    list_words: Callable[[Guest, int], Iterator[str]]
    """Command line, whose first process reads the scratch archive from a descriptor."""
    variables: Mapping[str, str]
    """Environment of the program, beside `PATH` and `HOME`, as templates with `{scratch}`."""
    list_files: Callable[[Guest], Mapping[str, str]] = lambda guest: {}
    """Files for the program in the scratch folder, by name."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Symbolic links for the program in the scratch folder, by name."""

    def find(self) -> str | None:
        """Return the program's path; None if it, or a program that it needs, is missing."""
        path = _build_search_path()
        paths = [
            next(filter(None, (shutil.which(name, path=path) for name in names)), None)
            for names in self.programs
        ]
        return paths[-1] if all(paths) else None


class ContainerRuntime:
    def __init__(self, name: str) -> None:
        self.name = name
        self._program = CONTAINER_PROGRAMS[name]

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if self._program.find() is None:
            names = " and ".join(" or ".join(names) for names in self._program.programs)
            raise self._build_error(f"it needs {names}, and does not find all of them")
        guest = await Guest.prepare(spec)
        archive = os.memfd_create("sandbox")
        try:
            with open(archive, "wb", closefd=False) as file:
                file.write(build_scratch_archive(guest, self._program))
            variables = {
                name: value.format(scratch=guest.scratch, is_writable="yes" if spec.root else "no")
                for name, value in self._program.variables.items()
            }
            environ = {"PATH": _build_search_path(), "HOME": guest.scratch, **variables}
            return await guest.start(
                [*self._program.list_words(guest, archive)], [archive], environ
            )
        except ClusterError as error:
            if not isinstance(error.__cause__, EOFError):  # too slow, or no process could start
                raise
            raise self._build_error(error.problems[0].message) from error
        finally:
            os.close(archive)

    def _build_error(self, reason: str) -> RecipeError:
        programs = " and ".join(names[0] for names in reversed(self._program.programs))
        hint = f"install {programs} on every node and allow user namespaces, or set "
        return build_isolation_error(
            self._program.title, reason, f"{hint}{ISOLATION_RECIPE_KEY}=bwrap"
        )


def _build_search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{_PROGRAM_FOLDERS}"


def _list_binds(guest: Guest, title: str, separators: str) -> Iterator[tuple[str, str, bool]]:
    """List the bind mounts of a container: source, path in the container, is it writable.

    Paths with `separators`, at which the program splits its command line, are refused.
    """
    for name, target in guest.writable:
        yield f"{guest.scratch}/{name}", target, True
    for source, target in ((f"{guest.scratch}/guest", GUEST_DIR), *guest.readonly):
        for path in (source, target):
            if any(separator in path for separator in separators):
                raise RecipeError(
                    f"{title} cannot show {path}: expected a path without any of {separators!r}, "
                    "at which its command line is split",
                    key=ISOLATION_RECIPE_KEY,
                    hint=f"name a path without them, or set {ISOLATION_RECIPE_KEY}=bwrap",
                )
        yield source, target, False


def _list_prefix_words(
    guest: Guest,
    archive_fd: int,
    namespaces: Sequence[str],
    script: str,
    program_files: int = 0,
) -> Iterator[str]:
    """List the words that prepare the scratch folder and run a script; its arguments follow.

    Args:
        guest: Contents of the container.
        archive_fd: Descriptor of a tar with the first contents of the scratch folder.
        namespaces: Options of `unshare`, beside those of a user and a mount namespace.
        script: Script that starts the container, as root in these namespaces.
        program_files: Number of files that the program makes in the scratch folder.
    """
    limits = guest.spec.limits
    yield from ("unshare", "--user", "--map-root-user", "--mount", *namespaces)
    yield from ("sh", "-c", build_kernel_limits_script(limits) + _PREPARE_SCRIPT + script)
    yield from ("sh", guest.scratch)
    yield str(limits.disk_bytes + _OTHER_SCRATCH_BYTES)
    yield str(limits.files + _OTHER_SCRATCH_FILES + program_files)
    yield from (str(archive_fd), str(guest.spec.root or ""))
    sources = [source for source, _ in guest.readonly]
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        mount = Path(line.split()[4].decode("unicode_escape"))
        if any(str(mount) != source and mount.is_relative_to(source) for source in sources):
            yield str(mount)
    yield "--"


def _list_nobody_words(
    guest: Guest, archive_fd: int, namespaces: Sequence[str] = ()
) -> Iterator[str]:
    """List the words of `_list_prefix_words` for user 65534 on the sandbox's network.

    `namespaces` are options of `unshare` beside those of a second user and mount namespace.
    """
    is_open = guest.spec.network == "open"
    outer = ("--cgroup", "--ipc", "--uts", *([] if is_open else ["--net"]))
    yield from _list_prefix_words(guest, archive_fd, outer, _BECOME_USER_SCRIPT)
    yield from ("" if is_open else require_python()[0], _LOOPBACK_UP_PROGRAM)
    yield from ("--user", f"--map-user={NOBODY_UID}", f"--map-group={NOBODY_UID}")
    yield from ("--mount", *namespaces)


def _list_podman_words(guest: Guest, archive_fd: int) -> Iterator[str]:
    namespaces = ("--cgroup", "--pid", "--mount-proc", "--fork", "--kill-child")
    yield from _list_prefix_words(
        guest, archive_fd, namespaces, _RUN_PODMAN_SCRIPT, _PODMAN_SCRATCH_FILES
    )
    yield from ("run", "--rm", "--cgroups=disabled", "--cap-drop=all", "--hostname=sandbox")
    for option in ("no-new-privileges", "label=disable", "mask=/sys", "seccomp=unconfined"):
        yield f"--security-opt={option}"
    for id_kind in ("uid", "gid"):
        yield f"--{id_kind}map={NOBODY_UID}:0:1"
    yield from (f"--user={NOBODY_UID}:{NOBODY_UID}", "--passwd=false", "--no-hosts", "--workdir=/")
    for name, limit in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard_limit = resource.getrlimit(limit)[1]  # podman's default may exceed it
        yield f"--ulimit={name}={hard_limit}:{hard_limit}"
    yield f"--network={'host' if guest.spec.network == 'open' else 'none'}"
    yield f"--preserve-fds={_PODMAN_CHANNEL_FD - 2}"
    yield "--tmpfs=/dev:rw,size=64k,nr_inodes=64,mode=755"
    if guest.spec.root is None:
        yield from ("--read-only", "--read-only-tmpfs=false")
    for source, target, is_writable in _list_binds(guest, "podman", ":"):
        yield f"--volume={source}:{target}:{'rw' if is_writable else 'ro'}"
    yield from ("--rootfs", f"{guest.scratch}/rootfs")
    yield from guest.build_server_command(_PODMAN_CHANNEL_FD)


def _list_apptainer_words(guest: Guest, archive_fd: int) -> Iterator[str]:
    yield from _list_nobody_words(guest, archive_fd)
    yield from (str(CONTAINER_PROGRAMS["apptainer"].find()), "--quiet", "exec", "--userns")
    yield from ("--containall", "--cleanenv", "--no-init", "--no-home", "--no-privs")
    yield from ("--no-umask", "--no-eval", "--pwd=/")
    # These are mounts that the machine's configuration of Apptainer would add.
    yield "--no-mount=home,tmp,hostfs,cwd,bind-paths"
    if guest.spec.root is not None:
        yield "--writable"
    for source, target, is_writable in _list_binds(guest, "Apptainer", ":,"):
        yield f"--bind={source}:{target}{'' if is_writable else ':ro'}"
    yield f"{guest.scratch}/rootfs"
    yield from guest.build_server_command()


def _list_enroot_words(guest: Guest, archive_fd: int) -> Iterator[str]:
    """List the words that start enroot, which needs a shell in the root file system."""
    namespaces = ("--pid", "--mount-proc", "--fork", "--kill-child")
    yield from _list_nobody_words(guest, archive_fd, namespaces)
    # enroot passes a word with a space to a shell, and would run a binary as a script.
    yield from ("enroot", "start", "rootfs", 'exec "$@"')
    yield from guest.build_server_command()


def _list_enroot_mounts(guest: Guest) -> Iterator[str]:
    yield "/proc /proc none x-create=dir,rbind,rw,nosuid,nodev,noexec"
    yield f"{guest.scratch}/dev /dev none x-create=dir,bind,rw,nosuid,noexec"
    for name in _ENROOT_DEVICES:
        yield f"/dev/{name} /dev/{name} none x-create=file,bind,rw,nosuid,noexec"
    yield (
        "devpts /dev/pts devpts x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620"
    )
    for name, target in guest.writable:
        source = f"{guest.scratch}/{name}"
        yield f"{source} {_escape(target)} none x-create=dir,bind,rw,nosuid,nodev"
    yield "none /dev none remount,bind,ro,nosuid,noexec"
    for source, target in ((f"{guest.scratch}/guest", GUEST_DIR), *guest.readonly):
        bind_type = "bind" if Path(source).is_file() else "rbind"
        yield f"{_escape(source)} {_escape(target)} none {bind_type},ro,nosuid,nodev"


def _escape(path: str) -> str:
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\$" else char for char in path)


CONTAINER_PROGRAMS = {
    "podman": ContainerProgram(
        "podman",
        (("crun",), ("podman",)),
        _list_podman_words,
        {
            "XDG_RUNTIME_DIR": "{scratch}/run",
            "CONTAINERS_CONF": "{scratch}/containers.conf",
            "CONTAINERS_STORAGE_CONF": "{scratch}/storage.conf",
            # Without it podman makes a user namespace that outlives the sandbox.
            "_CONTAINERS_USERNS_CONFIGURED": "done",
        },
        lambda guest: {
            name: text.format(scratch=guest.scratch) for name, text in _PODMAN_FILES.items()
        },
    ),
    "apptainer": ContainerProgram(
        "Apptainer",
        (("apptainer", "singularity"),),
        _list_apptainer_words,
        {
            "TMPDIR": "{scratch}/run",
            "APPTAINER_CONFIGDIR": "{scratch}/storage",
            "APPTAINER_CACHEDIR": "{scratch}/storage",
        },
    ),
    "enroot": ContainerProgram(
        "enroot",
        (("enroot",),),
        _list_enroot_words,
        {
            "SHELL": "/bin/sh",
            "TMPDIR": "{scratch}/run",
            "ENROOT_SYSCONF_PATH": "{scratch}/enroot",
            "ENROOT_CONFIG_PATH": "{scratch}/enroot/none",
            "ENROOT_CACHE_PATH": "{scratch}/storage",
            "ENROOT_TEMP_PATH": "{scratch}/run",
            "ENROOT_RUNTIME_PATH": "{scratch}/run",
            "ENROOT_DATA_PATH": "{scratch}",
            "ENROOT_LOGIN_SHELL": "no",
            "ENROOT_MOUNT_HOME": "no",
            "ENROOT_REMAP_ROOT": "no",
            "ENROOT_ALLOW_SUPERUSER": "no",
            "ENROOT_ROOTFS_WRITABLE": "{is_writable}",
        },
        lambda guest: {"enroot/mounts.d/all.fstab": "\n".join([*_list_enroot_mounts(guest), ""])},
        {f"dev/{name}": target for name, target in _ENROOT_DEVICE_LINKS.items()},
    ),
}
"""Container programs by their names in a recipe."""

_SCRATCH_FOLDERS = (
    *("rootfs", "upper", "work", "guest", "places", "lower", "dev", "storage", "run"),
)


def build_scratch_archive(guest: Guest, program: ContainerProgram) -> bytes:
    """Build a tar with the first contents of the scratch folder."""
    spec, stream = guest.spec, io.BytesIO()
    shown_in = "rootfs" if spec.root is None else "places"

    def locate(path: str) -> str:
        is_guests = path.startswith(f"{GUEST_DIR}/")
        return path.replace(GUEST_DIR, "guest", 1) if is_guests else f"{shown_in}{path}"

    files = {locate(path): content for path, content in guest.files.items()}
    files |= {name: text.encode() for name, text in program.list_files(guest).items()}
    links = {locate(path): target for path, target in guest.links.items()} | dict(program.links)
    writable = ["tmp", "workspace", *(name for name, _ in guest.writable)]
    mount_points = (GUEST_DIR, WORK_DIR, "/tmp", *spec.writable_folders)
    system_folders = (f"{shown_in}{path}" for path in ("/proc", "/sys", "/dev"))
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in (*_SCRATCH_FOLDERS, *system_folders):
            _add_member(archive, name)
        for name in (*dict.fromkeys(writable), *(f"{shown_in}{path}" for path in mount_points)):
            _add_member(archive, name, folder_mode=0o1777)
        for source, path in guest.readonly:
            _add_member(archive, locate(path), b"" if Path(source).is_file() else None)
        for name, content in files.items():
            _add_member(archive, name, content)
        for name, target in links.items():
            _add_member(archive, name, target=target)
    return stream.getvalue()


def _add_member(
    archive: tarfile.TarFile,
    member_path: str,
    content: bytes | None = None,
    *,
    folder_mode: int = 0o755,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(member_path)
    member.mode = folder_mode if content is None else 0o644
    member.type = tarfile.SYMTYPE if target else tarfile.DIRTYPE
    member.linkname = target
    if content is not None:
        member.type, member.size = tarfile.REGTYPE, len(content)
    archive.addfile(member, io.BytesIO(content or b""))
