"""Seccomp filter of system calls for sandboxed programs, as classic BPF.

The filter refuses with EPERM calls that make namespaces and mounts, inspect other processes, load
code into the kernel, or open sockets outside any network namespace. `clone3`, whose flags a
filter cannot read, fails with ENOSYS, after which libc calls `clone`. Call numbers are from Linux's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (seccomp(2), bpf(2)).
"""

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ARGUMENT_BYTES = 8
"""Offsets in `struct seccomp_data`; an argument's lower half comes first."""
_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWUTS, NEWIPC, NEWCGROUP and NEWTIME."""
_REFUSED_NAMES = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot"),
    *("open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "mount_setattr"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "pidfd_open"),
    *("bpf", "perf_event_open", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "kexec_load", "kexec_file_load", "init_module"),
    *("finit_module", "delete_module", "open_by_handle_at", "swapon", "swapoff", "reboot"),
    # They take memory that no limit counts; some of it stays until the node restarts.
    *("shmget", "memfd_create", "memfd_secret", "semget", "msgget", "mq_open"),
)
_SOL_SOCKET, _BUFFER_OPTIONS = 1, (7, 8)
"""SO_SNDBUF and SO_RCVBUF: setting one succeeds without effect, so that sockets keep the kernel's
default size (`memory.py`)."""
_AF_VSOCK = 40
"""Address family that reaches the host of a virtual machine from any network namespace."""


@dataclass(frozen=True)
class _SystemCallNumbers:
    audit_architecture: int
    refused: tuple[int, ...]
    """Numbers of `_REFUSED_NAMES`, in their order."""
    clone: int
    clone3: int
    socket: int
    setsockopt: int


_SYSTEM_CALLS_BY_MACHINE = {
    "x86_64": _SystemCallNumbers(
        0xC000003E,
        (
            *(272, 308, 165, 166, 155, 161),
            *(428, 429, 430, 431, 432, 442),
            *(101, 310, 311, 312, 438, 434),
            *(321, 298, 323, 425, 426, 427),
            *(248, 249, 250, 246, 320, 175),
            *(313, 176, 304, 167, 168, 169),
            *(29, 319, 447, 64, 68, 240),
        ),
        clone=56,
        clone3=435,
        socket=41,
        setsockopt=54,
    ),
    "aarch64": _SystemCallNumbers(
        0xC00000B7,
        (
            *(97, 268, 40, 39, 41, 51),
            *(428, 429, 430, 431, 432, 442),
            *(117, 270, 271, 272, 438, 434),
            *(280, 241, 282, 425, 426, 427),
            *(217, 218, 219, 104, 294, 105),
            *(273, 106, 265, 224, 225, 142),
            *(194, 279, 447, 190, 186, 180),
        ),
        clone=220,
        clone3=435,
        socket=198,
        setsockopt=208,
    ),
}


def build_seccomp_filter(machine: str = "") -> bytes | None:
    """Return the filter as seccomp(2) takes it; None for an unknown architecture.

    `machine` is the architecture as `uname -m` prints it, by default this machine's.
    """
    calls = _SYSTEM_CALLS_BY_MACHINE.get(machine or platform.machine())
    if calls is None:
        return None
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _assemble_bpf(calls))


def _assemble_bpf(calls: _SystemCallNumbers) -> Iterator[tuple[int, int, int, int]]:
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    yield _LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET
    yield _JUMP_EQUAL, 1, 0, calls.audit_architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD_WORD, 0, 0, _NUMBER_OFFSET
    yield _JUMP_AT_LEAST, 0, 1, _X32_BIT
    yield refuse
    for number in calls.refused:
        yield _JUMP_EQUAL, 0, 1, number
        yield refuse
    yield _JUMP_EQUAL, 0, 1, calls.clone3
    yield _RETURN, 0, 0, _ERRNO | errno.ENOSYS
    yield _JUMP_EQUAL, 0, 4, calls.clone
    yield _LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET
    yield _JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS
    yield refuse
    yield _RETURN, 0, 0, _ALLOW
    yield _JUMP_EQUAL, 0, 7, calls.setsockopt
    yield _LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET + _ARGUMENT_BYTES
    yield _JUMP_EQUAL, 0, 4, _SOL_SOCKET
    yield _LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET + 2 * _ARGUMENT_BYTES
    yield _JUMP_EQUAL, 1, 0, _BUFFER_OPTIONS[0]
    yield _JUMP_EQUAL, 0, 1, _BUFFER_OPTIONS[1]
    yield _RETURN, 0, 0, _ERRNO
    yield _RETURN, 0, 0, _ALLOW
    yield _JUMP_EQUAL, 0, 3, calls.socket
    yield _LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET
    yield _JUMP_EQUAL, 0, 1, _AF_VSOCK
    yield refuse
    yield _RETURN, 0, 0, _ALLOW
