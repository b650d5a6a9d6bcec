"""The stores that an engine's options name."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.kv_transfer import EXTRA, NAME, KvTransfer, address_of
from jengine.engine.setup.model_source import ModelSource
from jengine.execution.spec import ExecutionSpec
from jengine.stores.disk import DiskStore
from jengine.stores.memory import MAX_PAGE, MemoryStore, PageStore
from jengine.stores.network import PageServer, RemoteStore

MOST_PEERS = 64  # with open connections


def check_transfer(
    config: EngineConfig, transfer: KvTransfer, source: ModelSource, spec: ExecutionSpec
) -> None:
    """Checks that this engine's pages can travel.

    Raises:
        InvalidArgument: they cannot.
    """
    limit = None
    if config.num_processes > 1:
        limit = "must be None with num_processes: each process has only its own devices' part of a page"
    elif source.params is not None:
        limit = "must be None with params: pages are named by the contents of the model's files"
    elif spec.page_bytes * spec.mesh.size > MAX_PAGE:
        limit = f"must be None with pages above {MAX_PAGE >> 20} MiB: page_size must be smaller"
    if limit is not None:
        raise InvalidArgument(NAME, transfer.connector, limit)


class Stores:
    """An engine's stores: a folder, a page server, or the engines that may compute prompts for this one.
    `source` is called in one thread.

    Attributes:
        keep: gets pages; None: none does.
        server: serves these pages to other engines; None: it does not.

    Raises:
        InvalidArgument: the folder or the address cannot be used, or there is no token.
    """

    def __init__(self, transfer: KvTransfer) -> None:
        self._transfer, self.server = transfer, None  # type: KvTransfer, PageServer | None
        self._only = self.keep = None  # type: PageStore | None
        self._peers: OrderedDict[str, RemoteStore] = OrderedDict()  # the least recently used first
        if transfer.connector == "disk":
            assert transfer.root_dir is not None
            with _usable(f"{EXTRA}.root_dir", str(transfer.root_dir)):
                self._only = DiskStore(transfer.root_dir, transfer.max_bytes)
        else:
            self._token = transfer.token()
        if transfer.connector == "remote":
            self._only = RemoteStore(*transfer.address, self._token, transfer.load_timeout)
        if transfer.keeps:
            self.keep = self._only
        if transfer.connector == "sockets" and transfer.keeps:
            self.keep = MemoryStore(transfer.buffer_bytes, transfer.lease)
            with _usable("kv_port", f"{transfer.address[0]}:{transfer.address[1]}"):
                self.server = PageServer(self.keep, self._token, *transfer.address)

    def source(self, pages_from: str | None) -> PageStore | None:
        """Where a request's pages are looked up; None: nowhere.

        Args:
            pages_from: host:port of the engine that has computed its prompt, if any.
        """
        transfer = self._transfer
        if self._only is not None:
            return self._only if transfer.loads and pages_from is None else None
        if pages_from is None or not transfer.is_peer(pages_from):
            return None
        store = self._peers.pop(pages_from, None)
        if store is None:
            address = address_of("pages_from", pages_from)
            store = RemoteStore(*address, self._token, transfer.load_timeout)
        self._peers[pages_from] = store
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)[1].close()
        return store

    def close(self) -> None:
        """Closes all of them."""
        if self.server is not None:
            self.server.close()
        for store in (self._only, self.keep, *self._peers.values()):
            if store is not None:
                store.close()


@contextlib.contextmanager
def _usable(field: str, value: str) -> Iterator[None]:
    """Turns an OSError into an error of the option."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{NAME}.{field}", value, f"cannot be used: {error}") from None
