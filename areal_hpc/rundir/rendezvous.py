"""Rendezvous of a run's services: endpoint files on shared storage, and keys with mode 0600.

The run's own processes authenticate across nodes with the service key. It is PEM text: a private
key and its certificate, made once per run. Ledger and control proxies speak TLS with it, and their
clients trust this certificate alone, independent of host names. Each service accepts a bearer key
of its own, derived from the service key and the service's name: one service's key opens no other.
"""

import hmac
import os
import secrets
import socket
import ssl
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import fsync_path, write_atomic_private, write_temporary
from areal_hpc.wire.decoding import decode_json

LEDGER_SERVICE = "ledger"
"""Service that every driver, proxy and trainer calls."""
RANK_STORE_SERVICE = "trainer-store"
"""Store through which the ranks of a trainer meet."""
MIN_KEY_CHARS, MAX_KEY_CHARS = 32, 1024
MAX_KEY_FILE_CHARS = 1 << 16
_NOT_BEFORE, _NOT_AFTER = datetime(1950, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""Validity of the certificate, so wide that no node's clock can be outside it."""
_CERTIFICATE_BEGIN = "-----BEGIN CERTIFICATE-----"
CELL_PREFIX = "cell-"
"""Prefix of the names of training cells and of their jobs; a number follows."""
EVALUATION_CELL = "evaluation"
"""Name of the cell, and of its job, that plays only held-out tasks."""


def format_cell_name(index: int) -> str:
    return f"{CELL_PREFIX}{index}"


def is_training_cell_job(job: str) -> bool:
    return job.startswith(CELL_PREFIX)


def is_cell_job(job: str) -> bool:
    return job == EVALUATION_CELL or is_training_cell_job(job)


def format_proxy_name(cell: str) -> str:
    return f"proxy-{cell}"


def format_control_proxy_name(cell: str) -> str:
    return f"control-{cell}"


class ServiceEndpoint(msgspec.Struct, frozen=True):
    """Address of a live service. A restarted service overwrites its file with its own."""

    name: str
    url: str
    host: str
    pid: int
    started_at: float


def publish_endpoint(directory: Path, service_name: str, url: str) -> ServiceEndpoint:
    endpoint = ServiceEndpoint(service_name, url, socket.gethostname(), os.getpid(), time.time())
    write_atomic_private(directory / f"{service_name}.json", msgspec.json.encode(endpoint))
    return endpoint


def find_endpoint(directory: Path, service_name: str) -> ServiceEndpoint | None:
    """The endpoint of `service_name`, or None while it has not been published."""
    try:
        return decode_json((directory / f"{service_name}.json").read_bytes(), ServiceEndpoint)
    except FileNotFoundError:
        return None


def remove_own_endpoint(directory: Path, service_name: str) -> None:
    endpoint = find_endpoint(directory, service_name)
    if endpoint and (endpoint.host, endpoint.pid) == (socket.gethostname(), os.getpid()):
        (directory / f"{service_name}.json").unlink(missing_ok=True)


def ensure_admin_key(path: Path) -> str:
    """Read the key that opens sessions; make its file on first use."""
    return _ensure_key(path, "an admin key")


def ensure_service_key(path: Path) -> str:
    """Read the key of the run's own processes; make its file on first use."""
    if not path.exists():
        _create_key_file(path, generate_service_key())
    return read_service_key(path)


def read_service_key(path: Path) -> str:
    """Read the service key of a launched run.

    Raises:
        RecipeError: It is missing or damaged. A new one would not open services that run already.
    """
    hint = "end all jobs of the run (areal-hpc cancel), remove the file, and resume: that makes one"
    try:
        key = _read_private_text(path, "a service key")
    except FileNotFoundError:
        raise RecipeError("the run's service key is gone", key=str(path), hint=hint) from None
    if "PRIVATE KEY" not in key or "BEGIN CERTIFICATE" not in key:
        raise RecipeError(
            "expected a private key and a certificate in PEM", key=str(path), hint=hint
        )
    return key


def ensure_metrics_key(path: Path) -> str:
    """Read the key that Prometheus sends; make its file on first use."""
    return _ensure_key(path, "a metrics key")


def read_user_key(path: Path, key_description: str) -> str:
    """Read a key of a foreign service from a file that only the user can read.

    Raises:
        RecipeError: The file cannot be read, others may read it, or it holds no key.
    """
    try:
        key = _read_private_text(path, key_description)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise RecipeError(
            f"{key_description} cannot be read: {why}", key=str(path), hint="name another file"
        ) from error
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise RecipeError(
            f"expected {key_description} of 1 to {MAX_KEY_CHARS} printable ASCII characters, "
            f"got {len(key)}",
            key=str(path),
            hint="write the key into it, alone",
        )
    return key


def _ensure_key(path: Path, key_description: str) -> str:
    if not path.exists():
        _create_key_file(path, secrets.token_urlsafe(32))
    return _read_key(path, key_description)


def _create_key_file(path: Path, key: str) -> None:
    own_name = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    made = write_temporary(own_name, key.encode(), mode=0o600)
    try:
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink()
    fsync_path(path.parent)


def _read_key(path: Path, key_description: str) -> str:
    key = _read_private_text(path, key_description)
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not key.isascii():
        raise RecipeError(
            f"expected {key_description} of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} ASCII "
            f"characters, got {len(key)}",
            key=str(path),
            hint="remove the file: a key is made when it is missing",
        )
    return key


def _read_private_text(path: Path, key_description: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor) as stream:
        status = os.fstat(descriptor)
        problem, hint = "", f"chmod 600 {path}"
        if not stat.S_ISREG(status.st_mode):
            problem, hint = "expected a regular file, got something else", "name another file"
        elif status.st_uid != os.getuid():
            problem = f"expected a file of user {os.getuid()}, got one of user {status.st_uid}"
            hint = "copy the key to a file of your own"
        elif stat.S_IMODE(status.st_mode) & 0o077:
            problem = (
                f"expected mode 0600, got {stat.S_IMODE(status.st_mode):04o}: others may read it"
            )
        if problem:
            raise RecipeError(f"{key_description} is not safe: {problem}", key=str(path), hint=hint)
        return stream.read(MAX_KEY_FILE_CHARS).strip()


# Bearer keys and TLS ------------------------------------------------------------------------------


def generate_service_key() -> str:
    # Imported here: it is large, and only the making of a run needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "areal_hpc run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private_key, hashes.SHA256())
    )
    pem = private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (pem + certificate.public_bytes(serialization.Encoding.PEM)).decode().strip()


def derive_bearer_key(service_key: str, service: str) -> str:
    """Derive the bearer key of one service of a run."""
    text = f"areal_hpc requests to {service}"
    return hmac.digest(service_key.encode(), text.encode(), "sha256").hex()


def make_client_tls(service_key: str) -> ssl.SSLContext:
    """Make a TLS context that accepts only the run's certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.check_hostname = False
    tls.load_verify_locations(cadata=_CERTIFICATE_BEGIN + service_key.split(_CERTIFICATE_BEGIN)[1])
    return tls


def make_server_tls(service_key_file: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.load_cert_chain(service_key_file)
    return tls
