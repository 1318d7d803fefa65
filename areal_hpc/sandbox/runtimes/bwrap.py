"""Sandboxes of bubblewrap: namespaces without root, started in milliseconds.

A first pair of namespaces (`unshare`, user and mounts) holds a file system in memory whose size and
number of files are limited; bubblewrap makes the sandbox within it. All of it goes with its last
process.
"""

from collections.abc import Iterator

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.bubblewrap_command_line import (
    ISOLATION_OPTIONS,
    NOBODY_UID,
    USER_NAMESPACE_HINT,
    ContentDescriptors,
    hold_content_descriptors,
    list_system_options,
    may_become_nobody,
    require_bubblewrap,
    tells_of_refusal,
)
from areal_hpc.sandbox.images.root_archive import unpack_root
from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.guest import (
    GUEST_DIR,
    GUEST_ETC_FILES,
    GUEST_VARIABLES,
    LIMIT_KERNEL_OBJECTS_SCRIPT,
    LOWER_DIR,
    SERVER_SCRIPTS,
    WORK_DIR,
    GuestPython,
    build_command_server_command,
    choose_scratch_mount_point,
    find_guest_python,
)
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.seccomp import build_seccomp_filter
from areal_hpc.sandbox.spec import Network, SandboxSpec


def _build_isolation_error(reason: str, way_out: str = USER_NAMESPACE_HINT) -> RecipeError:
    hint = (
        f"{way_out}, or set rollout.agent.isolation=none: then commands of the agent can do all "
        "that you can"
    )
    return build_isolation_error("bubblewrap", hint, reason)


_PREPARE_SCRATCH_SCRIPT = f"""
set -e
{LIMIT_KERNEL_OBJECTS_SCRIPT}
mount -t tmpfs -o size="$2",nr_inodes="$3",mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/workspace"
mkdir -m 1777 "$1/tmp" "$1/shm"
mkdir "$1/pts"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,max=64 devpts "$1/pts" 2> /dev/null || :
for number in $5; do mkdir -m 1777 "$1/folder$number"; done
cd "$4"  # the sandbox sees this command line, and is told no path of this machine
shift 5
exec ./bwrap "$@"
"""


class BwrapRuntime:
    name = "bwrap"
    networks: tuple[Network, ...] = ("none", "session-only", "open")
    supports_root_file_system = True

    async def start(self, spec: SandboxSpec) -> Sandbox:
        as_nobody = may_become_nobody()
        bwrap = require_bubblewrap(_build_isolation_error, by_anybody=as_nobody)
        spec = await unpack_root(spec, NOBODY_UID if as_nobody else None)
        python = find_guest_python(by_anybody=as_nobody)
        taken = [str(bwrap), str(spec.root or ""), *spec.readonly_folders]
        taken += [source for source, _ in python.binds]
        scratch = choose_scratch_mount_point(taken)
        with hold_content_descriptors() as contents:
            command = [
                *("unshare", "--user", "--map-root-user", "--mount"),
                *("sh", "-c", _PREPARE_SCRATCH_SCRIPT, "sh", scratch),
                *(str(spec.limits.disk_bytes), str(spec.limits.files), str(bwrap.parent)),
                " ".join(map(str, range(len(spec.writable_folders)))),
                *build_bwrap_arguments(spec, python, scratch, contents),
            ]
            plan = SandboxStartPlan(
                command,
                WORK_DIR,
                spec.limits,
                {**GUEST_VARIABLES, **spec.variables},
                pass_fds=contents.descriptors,
                user=NOBODY_UID if as_nobody else None,
            )
            try:
                return await Sandbox.start(plan)
            except ClusterError as error:
                said = error.problems[0].message
                if tells_of_refusal(said):
                    raise _build_isolation_error(said) from error
                raise


def build_bwrap_arguments(
    spec: SandboxSpec, python: GuestPython, scratch: str, contents: ContentDescriptors
) -> list[str]:
    """Bubblewrap's command line. `scratch` is the folder whose size is limited."""
    command = [*ISOLATION_OPTIONS]
    if spec.network == "open":
        command.append("--share-net")
    if spec.root is None:
        command += _list_guest_options(scratch, spec.network, contents)
        for number, folder in enumerate(spec.writable_folders):
            command += ["--bind", f"{scratch}/folder{number}", folder]
        writable = [WORK_DIR, "/tmp", *spec.writable_folders]
    else:
        command += ["--overlay-src", str(spec.root)]
        command += ["--overlay", f"{scratch}/upper", f"{scratch}/work", "/"]
        command += ["--dir", WORK_DIR, "--perms", "1777", "--dir", "/tmp"]
        for folder in spec.writable_folders:
            command += ["--perms", "1777", "--dir", folder]
        writable = ["/"]
        if spec.network == "open":
            command += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    for folder in spec.readonly_folders:
        command += ["--ro-bind", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{scratch}/shm", "/dev/shm"]
    command += ["--dev-bind", f"{scratch}/pts", "/dev/pts"]
    command += ["--perms", "0755", "--tmpfs", GUEST_DIR]
    for source, place in python.binds:
        command += ["--ro-bind", source, place]
    for script in SERVER_SCRIPTS:
        descriptor = str(contents.add(script.read_bytes()))
        command += ["--ro-bind-data", descriptor, f"{GUEST_DIR}/{script.name}"]
    if spec.root is not None:
        command += ["--ro-bind", str(spec.root), LOWER_DIR]
    command += ["--remount-ro", GUEST_DIR, "--remount-ro", "/dev"]
    if spec.root is None:
        command += ["--remount-ro", "/"]
    program_filter = build_seccomp_filter()
    if program_filter is not None:
        command += ["--seccomp", str(contents.add(program_filter))]
    server = build_command_server_command(
        spec,
        python.command,
        f"{GUEST_DIR}/command_server.py",
        writable_folders=writable,
        counts_processes=True,
    )
    options = str(contents.add("\0".join([*command, "--chdir", "/"]).encode()))
    return ["--args", options, "--", *server]


def _list_guest_options(
    scratch: str, network: Network, contents: ContentDescriptors
) -> Iterator[str]:
    yield from ("--perms", "0755", "--dir", "/etc", *list_system_options())
    for name in ("/etc/resolv.conf", "/etc/ssl", "/etc/pki") if network == "open" else ():
        yield from ("--ro-bind-try", name, name)
    for name, content in GUEST_ETC_FILES.items():
        yield from ("--perms", "0644")
        yield from ("--ro-bind-data", str(contents.add(content.encode())), f"/etc/{name}")
    yield from ("--bind", f"{scratch}/workspace", WORK_DIR, "--bind", f"{scratch}/tmp", "/tmp")
