"""Pages copied to the host and back are bit-identical, for every form of cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution.device_state import PINNED, check_host_memory
from jengine.execution.executor import Worker
from jengine.execution.kinds import cache
from jengine.execution.programs import Programs, lower, program_keys
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.step_plan import Swaps
from jengine.table.program_table import SWAPS
from tests.execution.specs import make_spec
from tests.golden.weights import VARIANTS

MANY = 16384  # pages
FORMS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"variant": "gemma2", "kv_cache_dtype": "float8_e4m3fn"},
]
REST: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "int8"}]


@pytest.fixture(
    scope="module",
    params=[*FORMS, *(pytest.param(form, marks=pytest.mark.full) for form in REST)],
    ids=lambda form: "-".join(form.values()) or "float32",
)
def spec(request: pytest.FixtureRequest) -> ExecutionSpec:
    return make_spec(num_pages=40, host_pages=20, **request.param)


def contents(worker: Worker) -> list[np.ndarray]:
    """The contents of the cache's arrays, as bytes [num_pages, ...]."""
    return [np.array(array).view(np.uint8) for array in jax.tree.leaves(worker.state.cache)]


def test_pages_are_copied_and_others_left_alone(spec: ExecutionSpec) -> None:
    programs = Programs(spec, None, threads=1, progress=False, first=["allocate", "spill", "fill"])
    worker = Worker(spec, programs, {})
    rng = np.random.default_rng(0)
    worker.state.cache = jax.tree.map(
        lambda x: jax.device_put(rng.integers(0, 100, x.shape).astype(x.dtype), x.sharding),
        worker.state.cache,
    )
    before, runner = contents(worker), Runner(worker)
    pages = [*range(1, SWAPS + 4)]  # two calls, one of them padded
    runner.swap(Swaps(spills=[(0, page, 20 - page) for page in pages]))
    jax.block_until_ready(runner.moving)
    assert runner.swapped() == ([20 - page for page in pages], [])
    for rest in (pages[:5], pages[5:]):
        runner.swap(Swaps(fetches=[(20 - page, place) for place, page in enumerate(rest, 1)]))
        runner.wait_for_staged()
        assert runner.swapped() == ([], [*range(1, len(rest) + 1)])
        runner.swap(Swaps(fills=[(0, place, page + 20) for place, page in enumerate(rest, 1)]))
    for old, new in zip(before, contents(worker), strict=True):
        for page in range(1, spec.num_pages):
            assert np.array_equal(new[page], old[page - 20 if page - 20 in pages else page]), page


def test_the_cache_is_not_copied(spec: ExecutionSpec) -> None:
    many = dataclasses.replace(spec, num_pages=MANY)
    few, lots = (
        {key: lower(one, key).compile().memory_analysis() for key in ("spill", "fill")}
        for one in (spec, many)
    )
    assert lots["fill"].alias_size_in_bytes >= many.cache_bytes and lots["spill"].alias_size_in_bytes == 0
    for key in ("spill", "fill"):
        assert (
            lots[key].temp_size_in_bytes
            == few[key].temp_size_in_bytes
            <= 4 * SWAPS * spec.page_bytes + (1 << 16)
        ), key
    assert few["spill"].output_size_in_bytes < 2 * SWAPS * spec.page_bytes + (1 << 16)


def test_more_than_the_host_has_is_refused() -> None:
    spec = make_spec(host_pages=1 << 40)
    with pytest.raises(
        InvalidArgument,
        match=r"swap_space=9: must be at most [0-9.e+]+ GiB for each device, 70% of the host's",
    ):
        check_host_memory(9, spec)
    check_host_memory(9, make_spec(host_pages=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": -1}, "swap_space=-1: must be a finite number, at least 0"),
        (
            {"swap_space": 1, "enable_prefix_caching": False},
            "swap_space=1: must be 0 without enable_prefix_caching",
        ),
        ({"swap_space": 1e-9}, r"swap_space=1e-09: must be 0 or at least [0-9.e-]+, the size of a page"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        describe(EngineConfig.of("demo", options), model_config(VARIANTS["llama_gqa"]), make_mesh(1), Path())


def test_off_by_default() -> None:
    spec = describe(EngineConfig.of("demo", {}), model_config(VARIANTS["llama_gqa"]), make_mesh(1), Path())
    assert spec.host_pages == spec.staged == spec.staging_bytes == 0 and not {"spill", "fill"} & {
        *program_keys(spec)
    }


@pytest.mark.parametrize("away", [False, True])
def test_weights_are_copied_only_to_where_they_are_not(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update while the engine sleeps, those of a draft model alone are on the host."""

    def leaf(kind: str) -> Any:
        return SimpleNamespace(sharding=SimpleNamespace(memory_kind=kind))

    monkeypatch.setattr(cache, "copied", lambda array, sharding, memory: ("copy", memory))
    here, there, result = leaf("device"), leaf(PINNED), list[Any]()
    spec = SimpleNamespace(
        mesh=SimpleNamespace(local_devices=[SimpleNamespace(platform="gpu")]),
        leaves=[here, there],
        drafting=SimpleNamespace(leaves=[here]),
    )
    state: Any = SimpleNamespace(
        spec=spec,
        leaves=[here, there],
        draft_only_leaves=[there],
        only_of_draft=lambda leaves: leaves,
        put_leaves=lambda leaves, draft: result.extend([*leaves, *draft]),
    )
    cache.MoveWeights().run(state, "move-weights", np.array([away, True], np.int32))
    copy = ("copy", PINNED if away else None)
    assert result == ([copy, there, there] if away else [here, copy, copy])
