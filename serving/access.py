"""Who is let in: TLS and API keys, from files that are read at the start, and again when asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from jengine import InvalidArgument
from jengine.serving.authentication import Authenticator, KeyInterceptor
from jengine.serving.config import ServerConfig
from jengine.serving.metrics import Metrics
from jengine.serving.security import ApiKeys
from jengine.serving.tls import Tls, warn_of_access, warn_of_plaintext

log = logging.getLogger("jengine.serving")


class Access:
    """A server's.

    Attributes:
        tls: None without TLS.
        authenticator: None without API keys.
        credentials: for gRPC's port; None without TLS.
        interceptors: that let gRPC's calls through.

    Raises:
        InvalidArgument: a file cannot be used.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.tls = None if config.tls_cert is None else Tls(config)
        self._keys_file = config.api_keys
        self.authenticator = None if config.api_keys is None else Authenticator(_load(config.api_keys), metrics)
        self.credentials: grpc.ServerCredentials | None = None if self.tls is None else self.tls.credentials
        keys = self.authenticator
        self.interceptors: list[grpc.aio.ServerInterceptor] = [] if keys is None else [KeyInterceptor(keys)]
        warn_of_plaintext(config)
        metrics.certificate_expiry = self.certificate_expiry

    @property
    def reloads(self) -> bool:
        """Whether there is anything to reload."""
        return self.tls is not None or self.authenticator is not None

    def certificate_expiry(self) -> float | None:
        """When the server's certificate expires, in seconds since 1970; None without TLS."""
        return None if self.tls is None else self.tls.files.expires.timestamp()

    def reload(self) -> None:
        """Read the files again. New connections get the new certificates, new calls need the new keys; what is open goes on. Files that
        cannot be used change nothing: the log says why."""
        if self.tls is not None:
            _try(self._reload_certificates)
        if self.authenticator is not None:
            _try(self._reload_keys)

    def _reload_certificates(self) -> None:
        assert self.tls is not None
        self.tls.reload()
        log.info("reloaded certificates, valid until %s UTC", f"{self.tls.files.expires:%Y-%m-%d %H:%M}")

    def _reload_keys(self) -> None:
        assert self.authenticator is not None and self._keys_file is not None
        self.authenticator.keys = _load(self._keys_file)
        log.info("reloaded %d API keys", len(self.authenticator.keys))


def _load(path: str | Path) -> ApiKeys:
    keys = ApiKeys.load(path)
    warn_of_access("api_keys", path, 0o022)  # who writes it lets himself in; hashes may be read
    return keys


def _try(reload: Callable[[], None]) -> None:
    try:
        reload()
    except InvalidArgument as wrong:
        log.error("not reloaded, the old ones stay in use: %s", wrong)
