"""Makes the stores that an engine's options name."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.kv_transfer import EXTRA, NAME, KvTransfer, address_of
from jengine.engine.page_events import files_digest
from jengine.engine.page_transfer import Stores
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


def weights_digest(config: EngineConfig, source: ModelSource) -> str:
    """Identity of the weights that an engine starts with."""
    more = [] if config.calibration_data is None else [Path(config.calibration_data)]
    return files_digest(source.folder, more)


def make_stores(transfer: KvTransfer) -> Stores:
    """Opens the folder, or the connections and the server.

    Raises:
        InvalidArgument: the folder or the address cannot be used, or there is no token.
    """
    if transfer.connector == "disk":
        assert transfer.root_dir is not None
        try:
            disk = DiskStore(transfer.root_dir, transfer.max_bytes)
        except OSError as error:
            where = f"{NAME}.{EXTRA}.root_dir"
            raise InvalidArgument(where, str(transfer.root_dir), f"cannot be used: {error}") from None
        return _single(transfer, disk)
    token = transfer.token()
    if transfer.connector == "remote":
        return _single(transfer, RemoteStore(*transfer.address, token, transfer.load_timeout))
    peers = Peers(transfer, token)
    if not transfer.keeps:
        return Stores(None, peers.get, close=peers.close)
    memory = MemoryStore(transfer.buffer_bytes, transfer.lease)
    try:
        server = PageServer(memory, token, *transfer.address)
    except OSError as error:
        where, shown = f"{NAME}.kv_port", f"{transfer.address[0]}:{transfer.address[1]}"
        raise InvalidArgument(where, shown, f"cannot be used: {error}") from None

    def close() -> None:
        server.close()
        memory.close()
        peers.close()

    return Stores(memory, peers.get, server, close)


def _single(transfer: KvTransfer, store: PageStore) -> Stores:
    return Stores(
        store if transfer.keeps else None,
        lambda source: store if transfer.loads and source is None else None,
        close=store.close,
    )


class Peers:
    """Connections to the engines that may compute prompts for this one. Used by one thread."""

    def __init__(self, config: KvTransfer, token: bytes) -> None:
        self._config, self._token = config, token
        self._stores: OrderedDict[str, RemoteStore] = OrderedDict()  # the least recently used first

    def get(self, source: str | None) -> PageStore | None:
        """The pages of an engine, by its host:port. None: it is none of the peers."""
        if source is None or not self._config.is_peer(source):
            return None
        store = self._stores.pop(source, None)
        if store is None:
            store = RemoteStore(*address_of("pages_from", source), self._token, self._config.load_timeout)
        self._stores[source] = store
        if len(self._stores) > MOST_PEERS:
            self._stores.popitem(last=False)[1].close()
        return store

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
