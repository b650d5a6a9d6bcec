"""Certificates for tests, by default valid for an hour and for 127.0.0.1 and localhost."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority that signs any request."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._cert = _signed(name, self._key, name, self._key, ca=True)
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def sign(
        self, name: str, password: bytes | None = None, *, begins: float = -300.0, ends: float = 3600.0
    ) -> Pair:
        """Valid between these seconds from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        cert = _signed(name, key, str(issuer), self._key, ca=False, begins=begins, ends=ends)
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        sealed = (
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password)
        )
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed)
        )
        return pair


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
    begins: float = -300.0,
    ends: float = 3600.0,
) -> x509.Certificate:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(seconds=begins))
        .not_valid_after(now + datetime.timedelta(seconds=ends))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
