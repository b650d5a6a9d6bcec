"""Fills pages without holder with NaN after every step, so that any read of them shows in tokens and log
probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.execution.kv_cache import Cache
from jengine.execution.runner import Runner
from tests.engine.running import Answer, Work, limit_pages, run
from tests.engine.sharing import mixed, params

SMALLER = {"max_num_batched_tokens": 72}  # programs of one tile
EIGHT_BITS = {"quantization": "w8a8", "kv_cache_dtype": "int8"}  # programs that other tests have compiled
FORMS: list[Any] = [
    ("llama_gqa", "llvm", {}),
    ("gemma2", "llvm", {}),
    pytest.param(("llama_gqa", "llvm", EIGHT_BITS), marks=pytest.mark.full),
    pytest.param(("qwen3_next", "llvm", {}), marks=pytest.mark.full),
    pytest.param(("mistral_window", "xla", SMALLER), marks=pytest.mark.full),
    *(pytest.param(("deepseek_v3", form, SMALLER), marks=pytest.mark.full) for form in ("llvm", "xla")),
    *(
        pytest.param((variant, form, {**SMALLER, "kv_cache_dtype": dtype}), marks=pytest.mark.full)
        for variant, dtypes in (
            ("gemma2", ("auto", "int8", "fp8")),
            ("gemma3", ("int8",)),
            ("mistral_window", ("int8",)),
        )
        for form in ("llvm", "xla")
        for dtype in dtypes
    ),
]

pytestmark = pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")


class Poison:
    """Fills pages of an engine's cache: those that no running sequence holds and that cannot be found, and
    the null page.

    Attributes:
        pages, states: filled so far.
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        assert isinstance(runner, Runner)
        self.engine, self.worker, self.pages, self.states = engine, runner.worker, 0, 0
        shardings = jax.tree.map(lambda x: x.sharding, runner.spec.cache)
        self._fill = jax.jit(_filled, donate_argnums=0, out_shardings=shardings)

    def __call__(self) -> None:
        every = []
        for pool in self.engine.scheduler.blocks.pools:
            every.append(
                [page for page in range(1, pool.num_pages) if pool.holders(page) or page in pool._cached]
            )
            assert len(every[-1]) == pool.owned + pool.cached
        self.fill(*every)

    def fill(self, *every: list[int]) -> None:
        """Fills all pages of each pool except these, after all dispatched steps, which may still use free
        pages.
        """
        masks = [np.ones(pages, bool) for pages in self.worker.spec.pool_pages]
        for mask, kept in zip(masks, every, strict=True):
            mask[kept] = False
        self.worker.state.cache = self._fill(self.worker.state.cache, masks)
        self.pages += int(masks[0].sum())
        self.states += int(masks[-1].sum()) if len(masks) > 1 else 0


def _filled(cache: Cache, masks: list[jax.Array]) -> Cache:
    """Fills the masked pages of each pool with NaN. An 8-bit cache gets NaN as scales, and as values 127, or
    0x7F in fp8, which is NaN.
    """

    def filled(pages: jax.Array, mask: jax.Array) -> jax.Array:
        value: Any = {"int8": 127, "uint8": 0x7F}.get(str(pages.dtype), jnp.nan)
        return jnp.where(mask.reshape(-1, *[1] * (pages.ndim - 1)), jnp.asarray(value, pages.dtype), pages)

    return [
        jax.tree.map(lambda pages, mask=mask: filled(pages, mask), pool)
        for pool, mask in zip(cache, masks, strict=True)
    ]


def name(form: tuple[str, str, dict[str, Any]]) -> str:
    return "-".join([*form[:2], *map(str, form[2].values())])


@pytest.fixture(scope="module", params=FORMS, ids=name)
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    variant, form, options = request.param
    with pytest.MonkeyPatch.context() as patch:
        if form == "xla":
            for module in (
                "pallas_kernels.devices",
                "jengine.execution.spec",
                "jengine.engine.setup.shapes",
            ):
                patch.setattr(f"{module}.cpu_refused", lambda: "XLA's form is wanted")
        # what is patched must last until all is compiled
        engine: Engine = make_engine(variant, whole=form == "xla", speculative_config="none", **options)
        assert isinstance(engine.runner, Runner)
        assert (engine.runner.spec.identity()["kernels"] == "llvm") == (form == "llvm")
    return engine


def outputs(
    engine: Engine, work: list[Work], pages: int, each_step: Callable[[], object]
) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and log probabilities of tokens and prompts."""

    def of(answer: Answer) -> tuple[list[int], list[Any]]:
        return answer.tokens, [*(update.logprobs for update in answer.updates), *answer.scores]

    limit_pages(engine, pages)
    return [of(answer) for answer in run(engine, work, each_step)]


def vocabulary(engine: Engine) -> int:
    return min(engine.limits.vocab_size, 96)


def test_pages_without_a_holder_are_not_read(engine: Engine) -> None:
    pages = engine.scheduler.limits.most_pages(191) + 2
    poison, work, scheduler = (
        Poison(engine),
        mixed(40, vocab=vocabulary(engine), seed=2, masks=True),
        engine.scheduler,
    )
    preempted = scheduler.registry.num_preemptions
    expected = outputs(engine, work, pages, lambda: None)
    assert scheduler.registry.num_preemptions > preempted
    assert outputs(engine, work, pages, poison) == expected
    assert poison.pages > 1000 and scheduler.blocks.evictions > 50
    assert (poison.states > 1000) == (scheduler.blocks.states is not None)


def test_nor_are_those_that_were_forgotten(engine: Engine) -> None:
    """Cached pages become free at once, including those before pages that running sequences hold."""
    pages, poison, work = (
        engine.scheduler.limits.most_pages(191) * 2,
        Poison(engine),
        mixed(20, vocab=vocabulary(engine), seed=3, masks=True),
    )

    def forgetting(then: Callable[[], object]) -> Callable[[], None]:
        step = itertools.count()

        def each_step() -> None:
            if next(step) % 5 == 4:
                engine.do(ResetPrefixCache())
            then()

        return each_step

    expected = outputs(engine, work, pages, forgetting(lambda: None))
    assert outputs(engine, work, pages, forgetting(poison)) == expected


def test_pages_that_are_held_are_read(engine: Engine) -> None:
    """The poison works: in a page that a sequence holds, it changes the output."""
    poison, step = Poison(engine), itertools.count()
    work: list[Work] = [(list(range(40)), params(3, max_tokens=20))]
    expected = outputs(engine, work, 40, lambda: None)
    assert (
        outputs(
            engine,
            work,
            40,
            lambda: next(step) == 8 and poison.fill(*[[]] * len(engine.scheduler.blocks.pools)),
        )
        != expected
    )
