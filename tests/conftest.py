"""What all tests share."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# One folder of compiled programs for the whole run and the next ones. Set before anything imports jengine,
# and inherited by the processes that tests start.
os.environ.setdefault("JENGINE_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jengine"))
# With the extra aot, JAX would look for the rest of CUDA too, and print that it is not there.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time, and few tests depend on optimized code: see tests/compiling.py.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Threads of XLA on a CPU. Each warpgroup of an interpreted kernel that waits holds one: two cores' two would
# be a deadlock. Set before the first use of JAX, which may be the import of a test.
os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))

# A shell starts background jobs with SIGINT ignored, and so would be what tests start. Python then raises no
# KeyboardInterrupt.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two busy cores make any deadline flaky; a run that fails must fail again.
settings.register_profile("jengine", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=200)  # of `make test-full`
settings.load_profile("jengine")


# Files that take about 20 seconds of processor time or more, the longest first. They come first, so that no
# process of a parallel run is left with one of them at the end.
LONGEST = (
    "tests/models/test_golden.py", "tests/execution/test_gpu_programs.py",
    "tests/kernels/test_ahead_of_time.py", "tests/kernels/test_shipped_ptx_decode.py",
    "tests/kernels/test_shipped_ptx.py", "tests/kernels/test_shipped_ptx_prefill.py",
    "tests/kernels/test_shipped_ptx_ampere.py", "tests/kernels/test_planted_faults.py",
    "tests/parallel/test_processes.py", "tests/planning/test_plan.py",
    "tests/test_package.py", "tests/parallel/test_many_devices.py", "tests/kernels/test_attention_decode.py",
    "tests/engine/test_independence.py", "tests/engine/test_beams.py", "tests/test_vllm_scripts.py",
    "tests/checkpoints/test_calibration.py", "tests/engine/test_golden.py", "tests/kernels/test_int4.py",
    "tests/engine/test_progressive.py", "tests/engine/test_start.py", "tests/kernels/test_ampere.py",
    "tests/kernels/test_cpu_attention.py", "tests/engine/test_costs.py", "tests/docs/test_docs.py",
    "tests/execution/test_prebuilt_programs.py", "tests/kernels/test_masked.py",
    "tests/kernels/test_attention_prefill.py", "tests/serving/test_serve_demo.py", "tests/test_notebook.py",
    "tests/test_paged_attention.py", "tests/serving/test_lora_model.py", "tests/test_hub.py",
)  # fmt: skip
# What `make test-quick` leaves out besides: folders whose tests compile most.
COMPILING = tuple(
    f"tests/{name}" for name in ("checkpoints", "execution", "kernels", "models", "parallel", "planning")
)
ROOT = Path(__file__).parent.parent
ENDED = itertools.count(1)  # tests of this process
MAPS, MANY_MAPS = Path("/proc/self/maps"), 30_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out the files and folders of tests that take longest"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("quick") and collection_path.is_relative_to(ROOT):
        return collection_path.relative_to(ROOT).as_posix() in {*LONGEST, *COMPILING} or None
    return None  # pytest decides


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays: looking for garbage in it would take a third of its time, and each later
    search too.

    So nothing thaws it, and nothing counts it: `gc.get_freeze_count` walks a million objects, and each
    replay and start of an engine asks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        frozen, patch = gc.get_freeze_count(), pytest.MonkeyPatch()
        patch.setattr(gc, "get_freeze_count", lambda: frozen)
        patch.setattr(gc, "unfreeze", lambda: None)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Lets JAX forget what it has compiled before this process has too many memory maps. A program takes up
    to hundreds of the 65,530 that Linux allows; without one, the compiler crashes.
    """
    due = next(ENDED) % 16 == 0 and "jax" in sys.modules and MAPS.exists()
    if due and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True)
def no_new_variables() -> Iterator[None]:
    """Commands set variables for their process; here that is every test's. With another NPROC, later tests
    would not find programs that are saved.
    """
    before = dict(os.environ)
    yield
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def families() -> Iterator[None]:
    """Model families that a test registers are gone after it."""
    from jengine.models import FAMILIES

    before = {*FAMILIES}
    yield
    for name in {*FAMILIES} - before:
        del FAMILIES[name]


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """For a module whose subject is the code that users' programs have."""
    from tests.compiling import optimized

    with optimized():
        yield


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a byte-level tokenizer, and as many tokens as that has.."""
    import numpy as np
    from safetensors.numpy import save_file

    from tests.golden.weights import VARIANTS, tensor_shapes, uniform
    from tests.text.conftest import byte_level, write

    folder: Path = tmp_path_factory.mktemp("text_model")
    tokenizer = byte_level()
    config = {**VARIANTS["llama_tied"], "vocab_size": tokenizer.get_vocab_size()}
    tensors = {
        name: 0.3 * uniform(name, math.prod(shape)).reshape(shape)
        for name, shape in tensor_shapes(config).items()
    }
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return write(tokenizer, folder)
