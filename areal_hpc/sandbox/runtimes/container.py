"""Start of a sandbox whose namespaces another program makes: podman, Apptainer, enroot.

A first set of namespaces (`unshare`), in which the caller is root, covers the scratch folder with
a file system in memory whose size and number of files are limited. It holds `rootfs`, what is shown
in it (`guest`, `dev`), what commands may write (`workspace`, `tmp`, `shm`, one for each further
folder), or what a root file system is written over with (`upper`, `work`). The program starts one
container from it.
"""

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.bubblewrap_command_line import (
    NOBODY_UID,
    SYSTEM_FILES,
    SYSTEM_LINKS,
    find_sandbox_python,
    may_become_nobody,
)
from areal_hpc.sandbox.images.root_archive import unpack_root
from areal_hpc.sandbox.runtime import ISOLATION_RECIPE_KEY
from areal_hpc.sandbox.runtimes.guest import (
    GUEST_DIR,
    GUEST_ETC_FILES,
    GUEST_VARIABLES,
    LIMIT_KERNEL_OBJECTS_SCRIPT,
    SERVER_SCRIPTS,
    WORK_DIR,
    GuestPython,
    build_command_server_command,
    choose_scratch_mount_point,
    find_guest_python,
)
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import SandboxSpec

PROGRAM_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where container programs are, beside the folders of `PATH`."""
_OTHER_SCRATCH_BYTES, _OTHER_SCRATCH_FILES = 1 << 20, 60
"""Room in the scratch folder beside the files of a sandbox, whatever the program."""
_PREPARE_SCRIPT = f"""
set -e
{LIMIT_KERNEL_OBJECTS_SCRIPT}
mount -t tmpfs -o size="$2",nr_inodes="$3",mode=755 tmpfs "$1"
tar --extract --file "/proc/self/fd/$4" --directory "$1" --same-permissions --no-same-owner
if [ -n "$5" ]; then
  mount --bind "$5" "$1/guest/root"
  mount -t overlay overlay "$1/rootfs" -o \
"lowerdir=$1/places:$1/guest/root,upperdir=$1/upper,workdir=$1/work,userxattr"
  mount -o remount,bind,ro "$1/guest/root"
fi
shift 5
while [ "$1" != -- ]; do mount -o remount,bind,ro "$1"; shift; done
shift
"""
_LOOPBACK_UP_PROGRAM = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh22x", b"lo", 1))
"""
"""SIOCSIFFLAGS with IFF_UP (netdevice(7))."""
_BECOME_USER_SCRIPT = """
[ -z "$1" ] || "$1" -I -S -c "$2"
hostname sandbox 2> /dev/null || :
shift 2
exec unshare "$@"
"""


@dataclass(frozen=True, slots=True)
class ContainerSetup:
    """What a container is made of."""

    spec: SandboxSpec
    python: GuestPython
    readonly_binds: Sequence[tuple[str, str]]
    """What it shows of this machine, read-only, and where."""
    scratch: str
    """The scratch folder."""
    archive_fd: int
    """Descriptor of a tar of what that holds at first."""


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """How a program starts the container."""

    command: Sequence[str]
    variables: Mapping[str, str]
    """Of the program, beside `PATH`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What the scratch folder holds for it, by name."""
    links: Mapping[str, str] = field(default_factory=dict)


async def start_container(
    spec: SandboxSpec,
    plan_container: Callable[[ContainerSetup], ContainerPlan],
    build_error: Callable[[str], RecipeError],
) -> Sandbox:
    """A sandbox in a container; raises as `Runtime.start`."""
    user = NOBODY_UID if may_become_nobody() else None
    spec = await unpack_root(spec, user)
    python = find_guest_python(by_anybody=user is not None)
    binds = [*list_machine_binds(spec, python)]
    scratch = choose_scratch_mount_point([str(spec.root or ""), *(source for source, _ in binds)])
    archive = os.memfd_create("sandbox")
    try:
        how = plan_container(ContainerSetup(spec, python, binds, scratch, archive))
        with open(archive, "wb", closefd=False) as file:
            file.write(build_scratch_archive(spec, binds, how.files, how.links))
        plan = SandboxStartPlan(
            how.command,
            WORK_DIR,
            spec.limits,
            {**GUEST_VARIABLES, **spec.variables},
            pass_fds=[archive],
            user=user,
            process_environ={"PATH": build_runtime_program_search_path(), **how.variables},
        )
        return await Sandbox.start(plan)
    except ClusterError as error:
        if not isinstance(error.__cause__, EOFError):  # too slow, or no process could be made
            raise
        raise build_error(error.problems[0].message) from error
    finally:
        os.close(archive)


def build_runtime_program_search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{PROGRAM_SEARCH_PATH}"


def build_container_command_prefix(
    setup: ContainerSetup, namespaces: Sequence[str], script: str, *, program_files: int = 0
) -> list[str]:
    """A command line that prepares the scratch folder and goes on with a script; its words follow.

    Args:
        setup: What the container is made of.
        namespaces: Options of `unshare`, beside those of a user and a mount namespace.
        script: Starts the container; it is root, in these namespaces.
        program_files: Files that the program makes in the scratch folder.
    """
    spec, files = setup.spec, setup.spec.limits.files + _OTHER_SCRATCH_FILES + program_files
    return [
        *("unshare", "--user", "--map-root-user", "--mount", *namespaces),
        *("sh", "-c", _PREPARE_SCRIPT + script, "sh", setup.scratch),
        *(str(spec.limits.disk_bytes + _OTHER_SCRATCH_BYTES), str(files)),
        *(str(setup.archive_fd), str(spec.root or "")),
        *_list_mounts_below([source for source, _ in setup.readonly_binds]),
        "--",
    ]


def build_nobody_container_command_prefix(
    setup: ContainerSetup, namespaces: Sequence[str] = ()
) -> list[str]:
    """As `build_container_command_prefix`, for user 65534 on the sandbox's network.

    `namespaces` are options of `unshare` beside those of a second user and mount namespace.
    """
    is_open = setup.spec.network == "open"
    outer = ["--cgroup", "--ipc", "--uts", *([] if is_open else ["--net"])]
    python = None if is_open else find_sandbox_python(by_anybody=may_become_nobody())
    return [
        *build_container_command_prefix(setup, outer, _BECOME_USER_SCRIPT),
        *("" if python is None else python[0], _LOOPBACK_UP_PROGRAM),
        *("--user", f"--map-user={NOBODY_UID}", f"--map-group={NOBODY_UID}"),
        *("--mount", *namespaces),
    ]


def build_container_server_command(
    setup: ContainerSetup, *, channel_fd: int | None = None, filters_calls: bool = False
) -> list[str]:
    """The command line of the server in the container; see `build_command_server_command`."""
    return build_command_server_command(
        setup.spec,
        setup.python.command,
        f"{GUEST_DIR}/{SERVER_SCRIPTS[0].name}",
        writable_folders=list_writable_folders(setup.spec),
        counts_processes=True,
        channel_fd=channel_fd,
        filters_calls=filters_calls,
    )


def _list_mounts_below(sources: Sequence[str]) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        place = Path(line.split()[4].decode("unicode_escape"))
        if any(str(place) != one and place.is_relative_to(one) for one in sources):
            yield str(place)


_SCRATCH_FOLDERS = (
    "rootfs",
    "upper",
    "work",
    "guest",
    "guest/root",
    "places",
    "dev",
    "storage",
    "run",
)


def list_writable_folders(spec: SandboxSpec) -> list[str]:
    return ["/"] if spec.root is not None else [WORK_DIR, "/tmp", *spec.writable_folders]


def list_writable_binds(spec: SandboxSpec) -> Iterator[tuple[str, str]]:
    """Names below the scratch folder that are shown to be written in, and where."""
    yield "shm", "/dev/shm"
    if spec.root is None:
        yield from (("workspace", WORK_DIR), ("tmp", "/tmp"))
        for number, folder in enumerate(spec.writable_folders):
            yield f"folder{number}", folder


def list_machine_binds(spec: SandboxSpec, python: GuestPython) -> Iterator[tuple[str, str]]:
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


def check_paths(program: str, paths: Iterable[str], separators: str) -> None:
    """Refuse paths that a command line with `SOURCE:PLACE` cannot tell apart.

    Raises:
        RecipeError: A path has one of `separators`.
    """
    for path in paths:
        if any(one in path for one in separators):
            raise RecipeError(
                f"{program} cannot show {path}: expected a path without any of {separators!r}, at "
                "which its command line is split",
                key=ISOLATION_RECIPE_KEY,
                hint="name a path without them, or set rollout.agent.isolation=bwrap",
            )


def build_scratch_archive(
    spec: SandboxSpec,
    binds: Sequence[tuple[str, str]],
    files: Mapping[str, bytes],
    links: Mapping[str, str],
) -> bytes:
    """A tar of what the scratch folder holds at first, `files` and `links` by name among it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in _SCRATCH_FOLDERS:
            _add_member(archive, name)
        for name in (
            "shm",
            "tmp",
            "workspace",
            *(f"folder{n}" for n in range(len(spec.writable_folders))),
        ):
            _add_member(archive, name, folder_mode=0o1777)
        shown_in = "rootfs" if spec.root is None else "places"
        for place in ("/proc", "/sys", "/dev"):
            _add_member(archive, f"{shown_in}{place}")
        for place in (GUEST_DIR, WORK_DIR, "/tmp", *spec.writable_folders):
            _add_member(archive, f"{shown_in}{place}", folder_mode=0o1777)
        for source, place in binds:
            is_guests = place.startswith(f"{GUEST_DIR}/")
            name = place.replace(GUEST_DIR, "guest", 1) if is_guests else f"{shown_in}{place}"
            _add_member(archive, name, b"" if Path(source).is_file() else None)
        for path in map(Path, SYSTEM_LINKS if spec.root is None else ()):
            if path.is_symlink():
                _add_member(archive, f"rootfs{path}", target=str(path.readlink()))
        for script in SERVER_SCRIPTS:
            _add_member(archive, f"guest/{script.name}", script.read_bytes())
        for name, content in GUEST_ETC_FILES.items() if spec.root is None else ():
            _add_member(archive, f"rootfs/etc/{name}", content.encode())
        for name, data in files.items():
            _add_member(archive, name, data)
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
