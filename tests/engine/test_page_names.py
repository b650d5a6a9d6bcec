"""Names of pages: equal where pages are interchangeable, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jengine.core.images import CONTENT
from jengine.engine.page_events import (
    SAMPLE_BYTES,
    SAMPLES,
    PageNames,
    digest_of,
    digests,
    files_digest,
    hash_of,
    page_name,
)
from jengine.scheduling.pages.block_table import LoraSalt, Salt
from jengine.scheduling.pages.prefix_index import PrefixIndex
from tests.execution.specs import make_spec


def test_blocks_and_token_lists_have_the_same_digests() -> None:
    index, tokens = PrefixIndex(3), [1, 2, CONTENT + 7, CONTENT + 8, 0, 5, 9]
    salts: list[Salt] = [None, "", "None", "a", LoraSalt(1, "a", None), LoraSalt(2, "a", None)]
    for salt in salts:
        first = index.get(salt, tuple(tokens[:3]))
        second = index.get(first, tuple(tokens[3:6]))
        expected = [digest_of(first), digest_of(second)]
        assert [*digests(salt, tokens, 3)] == [*digests(salt, tokens[:6], 3)] == expected
        assert hash_of(second) == int.from_bytes(expected[1][:8], "big")
    found = {digest for salt in salts for digest in digests(salt, tokens, 3)}
    assert len(found) == 2 * len(salts), "no two salts share a page"
    assert [*digests("a", [1, 2], 1)][-1] != [*digests("a", [1, 2], 2)][-1]
    assert (
        len({page_name(space, next(digests(None, [1], 1)), g) for space in (b"a", b"b") for g in (0, 1)}) == 4
    )


def test_engines_share_names_only_if_their_pages_are_alike() -> None:
    spec = make_spec(host_pages=4)
    space = PageNames(spec, "w").space()
    assert space == PageNames(replace(spec, num_pages=99, max_slots=3), "w").space()
    others = [
        PageNames(spec, "other weights"),
        PageNames(replace(spec, kv_cache_dtype="int8"), "w"),
        PageNames(replace(spec, page_size=2 * spec.page_size), "w"),
        PageNames(replace(spec, max_model_len=spec.max_model_len - 1), "w"),
    ]
    spaces = {space, *(other.space() for other in others)}
    # weights that replaced others are known to this engine alone
    one, two = PageNames(spec, "w"), PageNames(spec, "w")
    spaces |= {one.space(1), one.space(2), one.space("1"), two.space(1)}
    assert len(spaces) == 1 + len(others) + 4 and one.space(1) == one.space(1)


def test_files_are_known_by_their_contents(tmp_path: Path) -> None:
    def folder(name: str, **files: bytes) -> str:
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
        return files_digest(tmp_path / name)

    large = bytearray(2 * SAMPLES * SAMPLE_BYTES + 5)
    one = folder("one", a=b"x", b=bytes(large))
    assert folder("two", a=b"x", b=bytes(large)) == one
    large[-1] = 1
    assert folder("three", a=b"x", b=bytes(large)) != one
    assert len({one, folder("four", a=b"xb"), folder("five", a=b"x", b=b""), folder("six", a=b"x")}) == 4
    assert files_digest(tmp_path / "one" / "a") != files_digest(tmp_path / "one" / "b")
