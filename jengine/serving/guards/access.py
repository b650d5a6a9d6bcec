"""TLS and API keys of a server, loaded from files at the start and on reload."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.guards.authentication import Authenticator, KeyInterceptor
from jengine.serving.guards.security import ApiKeys
from jengine.serving.guards.tls import Tls, warn_of_access, warn_of_plaintext
from jengine.serving.metrics.server_metrics import Metrics

log = logging.getLogger("jengine.serving")


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
        return None if self.tls is None else self.tls.files.expires.timestamp()

    def reload(self) -> None:
        """Reads the files again. New connections use the new certificates, new calls the new keys; open ones
        continue.

        Invalid files change nothing, and the reason is logged.
        """
        if self.tls is not None:
            _try(self._reload_certificates)
        if self._keys_file is not None:
            _try(self._reload_keys)

    def _reload_certificates(self) -> None:
        assert self.tls is not None
        self.tls.reload()
        log.info("reloaded certificates, valid until %s UTC", f"{self.tls.files.expires:%Y-%m-%d %H:%M}")

    def _reload_keys(self) -> None:
        assert self.authenticator is not None
        self.authenticator.keys = self._load_keys()
        log.info("reloaded %d API keys", len(self.authenticator.keys))

    def _load_keys(self) -> ApiKeys:
        keys = ApiKeys.of(self._keys_file, self._keys)
        if self._keys_file is not None:
            # users with write access could add a key; read access shows only hashes
            warn_of_access("api_keys", self._keys_file, 0o022)
        return keys


def _try(reload: Callable[[], None]) -> None:
    try:
        reload()
    except InvalidArgument as wrong:
        log.error("reload failed, the old files stay in use: %s", wrong)
