"""The checkpoint writer as its rank sees it."""

import contextlib
import logging
import mmap
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.checkpoints import build_checkpoint_write_error
from areal_hpc.trainer.checkpoints.writer_process import RemoveRequest, WriteReply, WriteRequest
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory, unpin_host_memory

logger = logging.getLogger(__name__)

MAX_WRITE_TRIES = 2
"""Writers that one file may cost before the checkpoint is given up."""
EXIT_TIMEOUT_S = 60.0
"""Time that a writer may still be deleting old checkpoints at the end of a run."""


class SharedCopyBuffer:
    """Host memory that holds a rank's part of a checkpoint, shared with the process that writes it.

    It is anonymous: a kill leaves nothing of it behind. It is as large as the largest copy so far,
    from the first checkpoint to the end of the run.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        """By which the writer process shares it."""
        self._memory: torch.Tensor | None = None
        self._is_pinned = False

    def reuse_or_grow(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """The memory as bytes, pinned if what is copied to it comes from a GPU."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._unpin_and_forget()
            size_bytes = max(size_bytes, mmap.PAGESIZE)
            # All pages at once: else each costs a trap, in the first checkpoint's copy.
            os.posix_fallocate(self.descriptor, 0, size_bytes)
            mapped = mmap.mmap(self.descriptor, size_bytes)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
            if device.type == "cuda":
                pin_host_memory(self._memory)
                self._is_pinned = True
        return self._memory

    def _unpin_and_forget(self) -> None:
        if self._memory is not None and self._is_pinned:
            unpin_host_memory(self._memory)
        self._memory, self._is_pinned = None, False

    def close(self) -> None:
        self._unpin_and_forget()
        os.close(self.descriptor)


class WriterClient:
    """One rank's memory shared with a writer process, and that process.

    All ranks' memory together has 14 bytes a parameter in bfloat16, 12 in float32.
    """

    def __init__(self) -> None:
        self.memory = SharedCopyBuffer()
        """Holds what is to be written; it must not change meanwhile."""
        self._request: WriteRequest | None = None
        self.took_s = 0.0
        """Seconds that the last file took to write."""
        self._tries = 0
        self._doomed: list[Path] = []
        """Directories that the writer was told to delete."""
        self._process = self._start_writer()

    def _start_writer(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "areal_hpc.trainer.checkpoints.writer_process",
             str(self.memory.descriptor), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(self.memory.descriptor,),
        )  # fmt: skip

    def begin_write(self, path: Path, size_bytes: int, files_to_fsync: list[str]) -> None:
        """Begin to write what was copied into a new file.

        Files beside it with the names `files_to_fsync` are to become durable with it.
        """
        self._request = WriteRequest(str(path), size_bytes, files_to_fsync)
        self._tries = 1
        self._send_request(self._request)

    def poll_write(self, timeout_s: float) -> bool:
        """True once the file, its neighbors and their directory are on disk.

        A writer that died is replaced, and its work done again, once.

        Raises:
            ClusterError: The storage refused, or writers keep dying.
        """
        if self._request is None:
            return True
        assert self._process.stdout is not None
        replies = select.poll()  # select() refuses descriptors from 1024 on, which many ranks need
        replies.register(self._process.stdout, select.POLLIN)
        if not replies.poll(timeout_s * 1000):
            return False
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._replace_dead_writer_and_retry()
            return False
        reply = msgspec.json.decode(line, type=WriteReply)
        if reply.error:
            raise build_checkpoint_write_error(Path(self._request.path), reply.error)
        logger.debug("%s took %.1f s", self._request.path, reply.seconds)
        self._request = None
        self.took_s = reply.seconds
        return True

    def _replace_dead_writer_and_retry(self) -> None:
        assert self._request is not None
        self._close_pipes()
        code = self._process.wait()
        if self._tries == MAX_WRITE_TRIES:
            raise ClusterError(
                f"the checkpoint writer died {MAX_WRITE_TRIES} times, last with exit code {code}",
                key=self._request.path,
                hint="look for the out-of-memory killer in dmesg",
            )
        logger.error(
            "the writer of checkpoints died with exit code %d: the file is written anew", code
        )
        self._process = self._start_writer()
        self._tries += 1
        self._send_request(self._request)
        for directory in self._doomed:
            self._send_request(RemoveRequest(str(directory)))

    def begin_remove_directory(self, directory: Path) -> None:
        self._doomed = [doomed for doomed in self._doomed if doomed.exists()] + [directory]
        self._send_request(RemoveRequest(str(directory)))

    def _send_request(self, request: WriteRequest | RemoveRequest) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: `poll_write` notices
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")

    def close(self) -> None:
        """Let the writer finish what it was asked for, and give the memory back."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
            for directory in self._doomed:  # gone, unless the writer died before
                shutil.rmtree(directory, ignore_errors=True)
        except subprocess.TimeoutExpired:
            logger.warning("the writer of checkpoints is still deleting: ended")
            self._process.kill()
            self._process.wait()
        self._close_pipes()
        self.memory.close()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
