"""Keys of one SGLang server on their way to it: a private file, which the server removes.

A command line is there for everybody on the node to read, and an environment is inherited by all
that the server starts. This module runs in SGLang's environment and imports nothing that is missing
there.
"""

import json
import logging
import os
from pathlib import Path

KEYS_FILE_VARIABLE = "AREAL_HPC_SGLANG_KEYS_FILE"
"""Environment variable that names the file; without it the server asks for no keys."""


def write_keys_file(folder: Path, api_key: str, admin_key: str) -> Path:
    """A file for `consume_keys_file_as_arguments`, readable by its owner alone."""
    path = folder / "keys.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({"--api-key": api_key, "--admin-api-key": admin_key}, stream)
    return path


def consume_keys_file_as_arguments() -> list[str]:
    """SGLang's arguments for the keys in the file, which is gone on return; nothing without one.

    From then on the keys stand in no line that this process logs: SGLang logs all its arguments.
    """
    named = os.environ.get(KEYS_FILE_VARIABLE, "")
    if not named:
        return []
    path = Path(named)
    keys: dict[str, str] = json.loads(path.read_text())
    path.unlink()
    _hide_secrets_in_logs([*keys.values()])
    return [f"{option}={key}" for option, key in keys.items()]


def _hide_secrets_in_logs(secrets: list[str]) -> None:
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: object, **options: object) -> logging.LogRecord:
        record = make_record(*args, **options)
        try:
            text = record.getMessage()
        except Exception:  # boundary: a handler would tell what is wrong with the call, and go on
            text = f"{record.msg} {record.args}"
            record.msg, record.args = text, ()
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, "(hidden)")
            record.msg, record.args = text, ()
        return record

    logging.setLogRecordFactory(make_clean_record)
