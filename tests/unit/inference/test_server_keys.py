"""Keys of a server stand in no line that it logs, however it logs."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.inference.server.server_keys import (
    KEYS_FILE_VARIABLE,
    consume_keys_file_as_arguments,
    write_keys_file,
)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def test_keys_are_hidden_also_in_a_call_whose_arguments_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_keys_file(tmp_path, "abc", "xyz")
    monkeypatch.setenv(KEYS_FILE_VARIABLE, str(path))
    assert consume_keys_file_as_arguments() == ["--api-key=abc", "--admin-api-key=xyz"]
    assert not path.exists()
    log = logging.getLogger("server")
    log.warning("keys: %s", "abc")
    log.warning("deprecated", FutureWarning, "xyz")  # as transformers does
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "keys: (hidden)"
    assert second == "deprecated (<class 'FutureWarning'>, '(hidden)')"
