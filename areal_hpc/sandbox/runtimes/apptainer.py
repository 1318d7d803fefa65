"""Sandboxes of Apptainer (or SingularityCE), the container program of most clusters.

Tests run on Apptainer 1.4.5 where `make slurm-roots` unpacked it, else on a stand-in that takes no
other options than its documentation has. Limits, network and the filter of system calls are made
here, as for enroot; namespaces of processes and the root are Apptainer's.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from areal_hpc.sandbox.runtime import build_isolation_error
from areal_hpc.sandbox.runtimes.container import (
    ContainerPlan,
    ContainerSetup,
    build_container_server_command,
    build_nobody_container_command_prefix,
    build_runtime_program_search_path,
    check_paths,
    list_writable_binds,
    start_container,
)
from areal_hpc.sandbox.runtimes.guest import GUEST_DIR, LOWER_DIR
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.spec import Network, SandboxSpec

_build_isolation_error = partial(
    build_isolation_error,
    "Apptainer",
    "install apptainer on every node and allow user namespaces, or set "
    "rollout.agent.isolation=bwrap",
)

_NOT_MOUNTED = "home,tmp,hostfs,cwd,bind-paths"
"""Of what the machine's configuration of Apptainer mounts by itself."""


class ApptainerRuntime:
    name = "apptainer"
    networks: tuple[Network, ...] = ("none", "session-only", "open")
    supports_root_file_system = True

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if find_apptainer() is None:
            raise _build_isolation_error("there is no program apptainer or singularity")
        return await start_container(spec, _plan_container, _build_isolation_error)


def find_apptainer() -> str | None:
    path = build_runtime_program_search_path()
    return shutil.which("apptainer", path=path) or shutil.which("singularity", path=path)


def _plan_container(setup: ContainerSetup) -> ContainerPlan:
    scratch = setup.scratch
    command = [
        *build_nobody_container_command_prefix(setup),
        *(str(find_apptainer()), "--quiet", "exec", "--userns", "--containall", "--cleanenv"),
        *("--no-init", "--no-home", "--no-privs", "--no-umask", "--no-eval"),
        *(f"--no-mount={_NOT_MOUNTED}", "--pwd=/"),
        *([] if setup.spec.root is None else ["--writable"]),
        *_list_bind_options(setup),
        f"{scratch}/rootfs",
        *build_container_server_command(setup, filters_calls=True),
    ]
    own = {"TMPDIR": "run", "APPTAINER_CONFIGDIR": "storage", "APPTAINER_CACHEDIR": "storage"}
    variables = {name: f"{scratch}/{folder}" for name, folder in own.items()}
    return ContainerPlan(command, {"HOME": scratch, **variables})


def _list_bind_options(setup: ContainerSetup) -> Iterator[str]:
    for source, place, how in _list_binds(setup):
        check_paths("Apptainer", (source, place), ":,")
        yield f"--bind={source}:{place}{how}"


def _list_binds(setup: ContainerSetup) -> Iterator[tuple[str, str, str]]:
    spec, scratch = setup.spec, setup.scratch
    for source, place in list_writable_binds(spec):
        yield f"{scratch}/{source}", place, ""
    yield f"{scratch}/guest", GUEST_DIR, ":ro"
    for source, place in setup.readonly_binds:
        yield source, place, ":ro"
    if spec.root is not None:
        yield str(spec.root), LOWER_DIR, ":ro"
    if spec.network == "open" and Path("/etc/resolv.conf").exists():
        yield "/etc/resolv.conf", "/etc/resolv.conf", ":ro"
