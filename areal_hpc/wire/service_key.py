"""The run's service key: how its own processes know one another across nodes.

It is PEM text: a private key and the certificate for it, made once for a run. Ledger and control
proxies speak TLS with it, and their clients trust this one certificate, whatever a host is called.
Each service takes a bearer key of its own, derived from the service key and the service's name:
the key of one opens no other.
"""

import hmac
import ssl
from datetime import UTC, datetime
from pathlib import Path

_NOT_BEFORE, _NOT_AFTER = datetime(1950, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""OpenSSL compares them with the node's clock, so they are the first and the last day there is."""
_CERTIFICATE_BEGIN = "-----BEGIN CERTIFICATE-----"


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
    """The key that opens the service `service` of a run."""
    text = f"areal_hpc requests to {service}"
    return hmac.digest(service_key.encode(), text.encode(), "sha256").hex()


def make_client_tls(service_key: str) -> ssl.SSLContext:
    """TLS that takes no other certificate than the run's."""
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
