"""Names of blocks and pages for others: other processes, later starts, and subscribers of page events."""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.core.weights import FIRST_VERSION, Version
from jengine.execution.spec import ExecutionSpec
from jengine.models.config import ModelConfig
from jengine.scheduling.pages.block import Block, Salt
from jengine.stores.memory import NAME_BYTES

FORMAT = 1  # changes when pages or names mean something else
NO_MATTER = ("eos_token_ids", "shards", "expert_shards")  # of a model's configuration
SAMPLES, SAMPLE_BYTES = 1024, 4096  # of a large file of weights that its identity reads


def digest_of(block: Block) -> bytes:
    """A digest of a block's tokens, images, prefix, cache salt and adapter: NAME_BYTES, the same in every
    process. An adapter counts as another one when it is loaded again.
    """
    unnamed: list[Block] = []
    parent: Block | Salt = block
    while isinstance(parent, Block) and parent.digest is None:
        unnamed.append(parent)
        parent = parent.parent
    before = parent.digest if isinstance(parent, Block) else _of_salt(parent)
    assert before is not None
    for unnamed_block in reversed(unnamed):
        before = unnamed_block.digest = _following(before, unnamed_block.tokens)
    return before


def digests(salt: Salt, tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The digests of a sequence's whole blocks, in order; see `digest_of`."""
    before = _of_salt(salt)
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        before = _following(before, tokens[start : start + page_size])
        yield before


def _of_salt(salt: Salt) -> bytes:
    return _digest(repr(salt).encode())  # of a fixed length, so that no salt can be continued by tokens


def _following(before: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=NAME_BYTES).digest()


class PageNames:
    """Names of pages in stores: engines whose pages are interchangeable have equal names for them.

    Args:
        weights: identity of the first weights; see `files_digest`.
    """

    def __init__(self, spec: ExecutionSpec, weights: str) -> None:
        self._facts, self._own = {**facts_of(spec), "weights": weights}, secrets.token_hex(16)

    def space(self, version: Version = FIRST_VERSION) -> bytes:
        """What the names of all pages have in common that were computed with these weights. Weights that
        replaced the first ones have names that no other engine knows: their contents are not compared.
        """
        facts = self._facts if version == FIRST_VERSION else {**self._facts, "version": [self._own, version]}
        return _digest(json.dumps(facts, sort_keys=True, default=str).encode())


def page_name(space: bytes, block: bytes, group: int) -> bytes:
    """The name of a block's page of a cache group."""
    return _digest(space + block + group.to_bytes(4, "big"))


def facts_of(spec: ExecutionSpec) -> dict[str, Any]:
    """What the contents of pages depend on, besides tokens and weights. The layout is that of all devices
    together, so engines with different numbers of devices share pages, unless kv heads are repeated.
    """
    page = [[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(spec.page)]
    return {
        "format": FORMAT,
        "model": _plain(spec.model.config),
        "dtype": str(spec.model.dtype),
        "quantization": spec.model.weights,
        "cache": str(spec.cache_dtype),
        "page_size": spec.page_size,
        "page": page,
        "groups": [[group.kind, group.window, group.pool] for group in spec.cached],
        "draft": None if spec.draft is None else _plain(spec.draft.config),
        "max_model_len": spec.max_model_len,  # some forms of RoPE depend on it
        # then all pages come from the same programs
        "programs": spec.fingerprint() if spec.table.batch_invariant else None,
    }


def _plain(model: ModelConfig) -> dict[str, Any]:
    return {name: fact for name, fact in model.plain().items() if name not in NO_MATTER}


def files_digest(folder: Path, more: Iterable[Path] = ()) -> str:
    """Identity of a model's files by their names and contents: of large files, the size and evenly spaced
    samples of the contents. Takes no longer than reading a few megabytes of each.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
    whole = hashlib.blake2b(digest_size=NAME_BYTES)
    for file in (*files, *more):
        size = file.stat().st_size
        whole.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            step = max(size // SAMPLES, SAMPLE_BYTES)
            for at in range(0, size, step):
                data.seek(at)
                whole.update(data.read(min(SAMPLE_BYTES, size - at)))
            data.seek(max(size - SAMPLE_BYTES, 0))
            whole.update(data.read(SAMPLE_BYTES))
    return whole.hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES).digest()
