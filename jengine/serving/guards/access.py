"""API keys of calls, over gRPC and HTTP, and the files of a server's TLS and keys, loaded at the start and on
reload.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import ApiKeys, Key, current_key
from jengine.serving.logs import SparseLog
from jengine.serving.metrics.server_metrics import Metrics

log = logging.getLogger("jengine.serving")
OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # used by orchestrators, which have no key


class Rejection(NamedTuple):
    """The reason for rejecting a call. `cause`: one word, for metrics."""

    cause: str
    message: str


MISSING = Rejection("missing_key", "an API key is required: `authorization: Bearer KEY`")
WRONG = Rejection("wrong_key", "the API key is unknown")


class Authenticator:
    """Finds the keys of calls.

    Attributes:
        keys: may be replaced at any time; running calls continue.
    """

    def __init__(self, keys: ApiKeys, metrics: Metrics | None = None) -> None:
        self.keys, self._metrics = keys, metrics or Metrics()
        self._rejections, self._raw = SparseLog(log.warning), SparseLog(log.error)

    def key_of(self, authorization: str | None) -> Key | Rejection:
        """The key of a call with this `Bearer KEY` header."""
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return MISSING
        presented = presented.strip()
        key = self.keys.find(presented)
        if key is not None:
            return key
        if (raw := self.keys.stored_raw(presented)) is not None:
            self._raw(
                "the line of %r in the keys file is the key itself, not its hash: replace both, since the"
                " file shows it (python -m jengine.serving.guards.security NAME)",
                raw.name,
            )
        return WRONG

    def rejected(self, why: Rejection, peer: str) -> None:
        """Counts and logs a rejected call."""
        self._metrics.rejected(why.cause)
        self._rejections("rejected a call from %s: %s", peer, why.message)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Rejects gRPC calls without a known key in their `authorization: Bearer KEY` metadata, except health
    checks.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._rejecters = {why: self._rejecter(why) for why in (MISSING, WRONG)}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None or call.method.startswith(OPEN_SERVICES):
            return handler  # gRPC reports unknown methods; their names are no secret
        key = self._authenticator.key_of(_authorization(call.invocation_metadata))
        if isinstance(key, Rejection):
            return self._rejecters[key]
        current_key.set(key)
        return handler

    def _rejecter(self, why: Rejection) -> grpc.RpcMethodHandler:
        async def reject(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            self._authenticator.rejected(why, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why.message)

        # A streaming method, whatever was called, since it answers before any message is read or parsed.
        return grpc.stream_stream_rpc_method_handler(reject)


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    return next(
        (value for name, value in metadata if name == "authorization" and isinstance(value, str)), None
    )


SOON = datetime.timedelta(days=14)  # before a certificate expires


class Tls:
    """A server's TLS or mutual TLS. `reload` reads the files again, for new connections.

    Attributes:
        credentials: for gRPC's port.
        context: for ports of HTTP.
        expires: expiry of the chain's first certificate.

    Raises:
        InvalidArgument: as `read`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._changed: grpc.ServerCertificateConfiguration | None = None
        configuration, self.context, self.expires = read(config)
        mutual = config.tls_client_ca is not None
        self.credentials = grpc.dynamic_ssl_server_credentials(configuration, self._fetch, mutual)

    def reload(self) -> None:
        """Raises InvalidArgument if the files are invalid; then nothing changes."""
        self._changed, self.context, self.expires = read(self._config)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called for each new connection, in a gRPC thread. None means no change."""
        changed, self._changed = self._changed, None
        return changed


def read(
    config: ServerConfig,
) -> tuple[grpc.ServerCertificateConfiguration, ssl.SSLContext, datetime.datetime]:
    """Reads and validates the files. Returns them for gRPC and for HTTP, with their earliest expiry. Warns of
    certificates that expire soon, and of private keys that others can read.

    Raises:
        InvalidArgument: a file cannot be read or is not a PEM file of its kind, the key does not match the
            certificate, or a certificate is not valid now.
    """
    assert config.tls_cert is not None and config.tls_key is not None
    cert, key = _bytes("tls_cert", config.tls_cert), _bytes("tls_key", config.tls_key)
    ca = None if config.tls_client_ca is None else _bytes("tls_client_ca", config.tls_client_ca)
    # reads the files like gRPC, but reports errors immediately
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # rejects encrypted keys instead of prompting on a terminal
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (ssl.SSLError, ValueError) as wrong:
        raise InvalidArgument(
            "tls_key", str(config.tls_key), f"no PEM pair with tls_cert={str(config.tls_cert)!r}: {wrong}"
        ) from None
    expires = _check_dates("tls_cert", config.tls_cert, cert, all)
    if ca is not None and config.tls_client_ca is not None:
        _check_dates("tls_client_ca", config.tls_client_ca, ca, any)  # the others still authenticate clients
    warn_of_access("tls_key", config.tls_key, 0o027)
    if config.tls_client_ca is not None:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca), context, expires


def _check_dates(
    field: str, path: str | Path, pem: bytes, needed: Callable[[Iterable[bool]], bool]
) -> datetime.datetime:
    """The earliest expiry of these certificates. All or any of them must be valid now, depending on
    `needed`.
    """
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as wrong:
        raise InvalidArgument(field, str(path), f"no PEM certificates: {wrong}") from None
    now = datetime.datetime.now(datetime.UTC)
    wrongs = [_why_not_valid(certificate, now) for certificate in certificates]
    messages = [
        f"the certificate of {c.subject.rfc4514_string()} {why}"
        for c, why in zip(certificates, wrongs, strict=True)
        if why
    ]
    if not needed(not why for why in wrongs):
        raise InvalidArgument(field, str(path), messages[0])
    messages += [
        f"the certificate of {c.subject.rfc4514_string()} expires on {_date(c.not_valid_after_utc)}"
        for c in certificates
        if now <= c.not_valid_after_utc < now + SOON
    ]
    for line in messages:
        log.warning("%s=%s: %s", field, path, line)
    return min(certificate.not_valid_after_utc for certificate in certificates)


def _why_not_valid(certificate: x509.Certificate, now: datetime.datetime) -> str | None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        return f"expired on {_date(ends)}"
    return f"is not valid before {_date(begins)}" if now < begins else None


def _date(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def warn_of_access(field: str, path: str | Path, mode: int) -> None:
    """Warns if the file's permissions include one of these bits, which give access to other users."""
    allowed = Path(path).stat().st_mode & 0o777
    if allowed & mode:
        log.warning(
            "%s=%s: other users may %s it (mode %03o): chmod 600",
            field,
            path,
            "write" if allowed & mode & 0o022 else "read",
            allowed,
        )


def warn_of_plaintext(config: ServerConfig) -> None:
    """Warns once, at the start, if the server can be reached from other machines without TLS."""
    if config.tls_cert is None and not _is_loopback(config.host):
        what = (
            "requests and answers"
            if config.api_keys is None and not config.api_key
            else "API keys, requests and answers"
        )
        log.warning(
            "serving plaintext on %s: the network can read %s; set tls_cert and tls_key to turn TLS on",
            config.host,
            what,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes(field: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as wrong:
        raise InvalidArgument(field, str(path), f"cannot be read: {wrong.strerror}") from None


class Access:
    """A server's certificates and keys.

    Attributes:
        tls: None without TLS.
        authenticator: None without API keys.
        credentials: for the gRPC port; None without TLS.
        interceptors: for gRPC calls.

    Raises:
        InvalidArgument: a file cannot be used.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.tls = None if config.tls_cert is None else Tls(config)
        self._keys_file, self._keys = config.api_keys, config.api_key or ()
        uses_keys = self._keys_file is not None or self._keys
        self.authenticator = Authenticator(self._load_keys(), metrics) if uses_keys else None
        self.credentials: grpc.ServerCredentials | None = None if self.tls is None else self.tls.credentials
        keys = self.authenticator
        self.interceptors: list[grpc.aio.ServerInterceptor] = [] if keys is None else [KeyInterceptor(keys)]
        warn_of_plaintext(config)
        metrics.certificate_expiry = self.certificate_expiry

    @property
    def reloads(self) -> bool:
        """Whether there are files to reload."""
        return self.tls is not None or self._keys_file is not None

    def certificate_expiry(self) -> float | None:
        """Expiry of the server's certificate in seconds since 1970; None without TLS."""
        return None if self.tls is None else self.tls.expires.timestamp()

    def reload(self) -> None:
        """Reads the files again. New connections use the new certificates, new calls the new keys; open ones
        continue.

        Invalid files change nothing, and the reason is logged.
        """
        for reload in (self._reload_certificates, self._reload_keys):
            try:
                reload()
            except InvalidArgument as wrong:
                log.error("reload failed, the old files stay in use: %s", wrong)

    def _reload_certificates(self) -> None:
        if self.tls is not None:
            self.tls.reload()
            log.info("reloaded certificates, valid until %s", _date(self.tls.expires))

    def _reload_keys(self) -> None:
        if self.authenticator is not None and self._keys_file is not None:
            self.authenticator.keys = self._load_keys()
            log.info("reloaded %d API keys", len(self.authenticator.keys))

    def _load_keys(self) -> ApiKeys:
        keys = ApiKeys.of(self._keys_file, self._keys)
        if self._keys_file is not None:
            # users with write access could add a key; read access shows only hashes
            warn_of_access("api_keys", self._keys_file, 0o022)
        return keys
