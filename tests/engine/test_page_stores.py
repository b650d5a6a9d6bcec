"""Pages from stores give the same tokens as computed ones; whatever a store does, every request ends once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import Ended, TokenUpdate
from jengine.engine import page_transfer
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import Pause, Resume
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.stores.disk import DiskStore
from jengine.stores.frames import TOKEN
from tests.engine.test_sharing import some

SPACE = 0.05  # GiB
PAGE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=8)
PREFIX = some(64, seed=9)
PROMPTS = [(PREFIX + some(20 + i, seed=i), (GREEDY, SEEDED)[i % 2]) for i in range(4)] + [
    (some(37, seed=5), SEEDED)
]
WHOLE = [(len(prompt) - 1) // PAGE * PAGE for prompt, _ in PROMPTS]
Found = list[tuple[list[int], int]]  # of each prompt, the tokens, and how many of the prompt's were cached


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a token of this test")
    monkeypatch.setattr(page_transfer, "LEAST_WAIT", 60.0)  # for busy machines,
    monkeypatch.setattr(page_transfer, "GAIN", 0.0)  # where loading is not always the faster way


@pytest.fixture
def make(make_engine: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    made = list[Engine]()

    def one(variant: str = "llama_gqa", how: dict[str, Any] | None = None, **options: Any) -> Engine:
        engine = make_engine(variant, swap_space=SPACE, kv_transfer_config=how, **options)
        engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
        if engine.pages is not None:
            engine.pages._rates[None] = 0.0  # loading is free
        made.append(engine)
        return engine

    yield one
    for engine in made:
        engine.close()


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    extra = {"root_dir": str(folder), "load_timeout": 60.0, **more}
    return {"kv_connector": "disk", "kv_connector_extra_config": extra}


def producer(engine: Engine) -> str:
    assert engine.pages is not None and engine.pages.address is not None
    return engine.pages.address


def consumer(*peers: str, **more: Any) -> dict[str, Any]:
    extra = {"peers": [*peers], "load_timeout": 60.0, **more}
    return {"kv_connector": "sockets", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}


PRODUCER = {"kv_connector": "sockets", "kv_role": "kv_producer", "kv_port": 0}


def answers(
    engine: Engine,
    work: Any = PROMPTS,
    salt: str | None = None,
    source: str | None = None,
    saved: bool = True,
) -> Found:
    """Runs prompts one after the other, and then steps until all pages are saved, if `saved`."""
    found = []
    for number, (prompt, how) in enumerate(work):
        request = Request(
            request_id=str(number), prompt_token_ids=prompt, params=how, cache_salt=salt, pages_from=source
        )
        engine.limits.validate(request)
        engine.add(request)
        updates, ended = list[TokenUpdate](), 0
        while engine.has_work if saved else engine.has_requests:
            for update in engine.step():
                assert isinstance(update, TokenUpdate), update
                updates.append(update)
                ended += update.finish_reason is not None
        assert ended == 1
        found.append(([update.token for update in updates], updates[-1].cached))
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.owned == 0 and not engine.scheduler.registry.incoming
    return found


def store_load(engine: Engine) -> Any:
    assert engine.load.store is not None
    return engine.load.store


CASES = [("gemma2", {})]  # full attention and windows
REST = [
    ("llama_gqa", {"kv_cache_dtype": "int8"}),
    ("qwen2_window", {}),
    ("llama_gqa", {"kv_cache_dtype": "fp8"}),
    ("gemma3", {}),
    ("deepseek_v2", {}),
]


@pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")
@pytest.mark.parametrize(
    ("variant", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_a_folder_outlives_its_engine(
    make: Callable[..., Engine], tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    alone = answers(make(variant, **options))
    first = make(variant, disk(tmp_path), **options)
    assert answers(first, saved=False) == alone
    first.close()
    kept = store_load(first)
    assert kept.kept > 8 and not kept.failures and not kept.dropped
    again = make(variant, disk(tmp_path), **options)
    found = answers(again)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    assert [cached for _, cached in found] == WHOLE, "all whole pages are loaded"
    load = store_load(again)
    assert load.hits > 8 and load.loaded_bytes > 0 and not load.failures
    # tenants share nothing
    assert [cached for _, cached in answers(again, PROMPTS[4:], salt="other")] == [0]
    # nor do models, layouts or damaged files
    assert store_load(again).hits == load.hits
    for file in tmp_path.rglob("*.page"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    third = make(variant, disk(tmp_path), **options)
    assert answers(third)[-1] == alone[-1] and store_load(third).hits == 0
    assert store_load(third).kept > 0, "damaged pages were replaced"


@pytest.mark.full
def test_keys_differ(make: Callable[..., Engine], tmp_path: Path) -> None:
    """Pages of another model, dtype or page size are never found."""
    first = make(how=disk(tmp_path))
    answers(first, PROMPTS[:1])
    first.close()
    for variant, options in (
        ("llama_tied", {}),
        ("llama_gqa", {"kv_cache_dtype": "int8"}),
        ("llama_gqa", {"page_size": 32, "num_pages": 60}),
    ):
        other = make(variant, disk(tmp_path), **options)
        answers(other, PROMPTS[:1])
        assert store_load(other).hits == 0
    assert len(DiskStore(tmp_path, 1 << 30)) > 3 * 4


def test_prefill_elsewhere(make: Callable[..., Engine]) -> None:
    alone = answers(make())
    prefill = make(how=PRODUCER)
    source = producer(prefill)
    decode = make(how=consumer(source))
    for number, (prompt, how) in enumerate(PROMPTS):
        answers(prefill, [(prompt, SamplingParams(temperature=0.0, max_tokens=1))])
        [(tokens, cached)] = answers(decode, [(prompt, how)], source=source)
        assert tokens == alone[number][0] and cached == WHOLE[number]
    sent, got = prefill.pages, store_load(decode)
    assert sent is not None and got.hits * len(sent._like) > 0 and got.failures == got.late == 0
    # a producer that is gone: prompts are computed
    prefill.close()
    [(tokens, cached)] = answers(decode, [(some(50, seed=77), GREEDY)], source=source)
    assert cached == 0 and len(tokens) == 8 and store_load(decode).failures > 0


def test_a_prompt_is_queued_whole_or_not_at_all(make: Callable[..., Engine]) -> None:
    """Its pages' address is refused after its sequences are known: they used to run for nobody."""
    engine = make(how=consumer("127.0.0.1:*"))

    def requests(source: str | None) -> list[Request]:
        return [
            Request(request_id=f"{source}-{i}", prompt_token_ids=PREFIX, params=GREEDY, pages_from=source)
            for i in range(2)
        ]

    wrong = requests("127.0.0.1:99999")
    with pytest.raises(InvalidArgument, match="must be host:port"):
        engine.add(*wrong)
    assert not engine.has_requests and not engine.scheduler.registry.incoming
    engine.scheduler.check_integrity()
    engine.do(Pause("keep"))
    right = requests(None)
    engine.add(*wrong)
    engine.add(*right)
    engine.do(Resume())
    ended = dict[str, str]()
    while engine.has_work:
        for update in engine.step():
            if isinstance(update, Ended):
                ended[update.request_id] = update.reason
            elif isinstance(update, TokenUpdate) and update.finish_reason is not None:
                ended[update.request_id] = update.finish_reason
    assert ended == dict.fromkeys((one.request_id for one in wrong), "error") | dict.fromkeys(
        (one.request_id for one in right), "length"
    )
    engine.scheduler.check_integrity()


def test_a_store_that_hangs_delays_no_request_for_long(make: Callable[..., Engine], tmp_path: Path) -> None:
    import threading

    engine = make(how=disk(tmp_path, load_timeout=0.05))
    pages, release = engine.pages, threading.Event()
    assert pages is not None
    hanging = pages._stores.source(None)
    assert hanging is not None
    hanging.find = lambda names, wait=0.0: [release.wait(60)] * len(names)  # type: ignore[method-assign]
    found = answers(engine, PROMPTS[:2])
    assert [cached for _, cached in found] == [0, 64] and store_load(engine).late == 2
    # one that is aborted while it waits
    engine.add(Request(request_id="a", prompt_token_ids=some(60, seed=1), params=GREEDY))
    assert engine.scheduler.registry.incoming
    engine.end("a", "abort")
    while engine.has_work:
        assert not [one for one in engine.step() if not isinstance(one, Ended)]
    engine.step()
    assert not engine.scheduler.registry.incoming and not pages._loads
    release.set()
