"""What a server says, on its way to storage that takes it late, or not at all."""

import os
import subprocess
import sys
from pathlib import Path

from areal_hpc.inference.server.server_log_writer import MAX_HELD_BYTES, ServerLogPipe
from tests.support.deadlines import scaled

TIMEOUT_S = scaled(30.0)


def start_speaking(log: ServerLogPipe, size_bytes: int) -> subprocess.Popen[bytes]:
    says = f"import sys; sys.stdout.write('x' * {size_bytes} + 'last words')"
    speaker = subprocess.Popen([sys.executable, "-c", says], stdout=log.write_end)
    log.start_copying()
    return speaker


def read_whole(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))


def hung_file(folder: Path) -> tuple[Path, int]:
    """A file that takes 64 KiB and then nothing until the descriptor is read."""
    path = folder / "server.log"
    os.mkfifo(path)
    return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def test_a_server_does_not_wait_for_the_storage_of_its_log(tmp_path: Path) -> None:
    path, reading = hung_file(tmp_path)
    log = ServerLogPipe(path)
    assert start_speaking(log, 1 << 20).wait(TIMEOUT_S) == 0
    os.set_blocking(reading, True)
    assert read_whole(reading) == b"x" * (1 << 20) + b"last words"
    os.close(reading)


def test_what_is_held_for_the_storage_is_bounded_and_the_file_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    path, reading = hung_file(tmp_path)
    log = ServerLogPipe(path)
    assert start_speaking(log, 2 * MAX_HELD_BYTES).wait(TIMEOUT_S) == 0
    os.set_blocking(reading, True)
    written = read_whole(reading)
    assert len(written) < 1.5 * MAX_HELD_BYTES
    assert b"bytes left out: the storage took none)" in written
    os.close(reading)


def test_last_words_are_in_the_file_behind_those_of_an_earlier_server(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    for words in (b"xlast words", b"xlast wordsxlast words"):
        log = ServerLogPipe(path)
        start_speaking(log, 1).wait(TIMEOUT_S)
        log.wait_until_written(TIMEOUT_S)
        assert path.read_bytes() == words
