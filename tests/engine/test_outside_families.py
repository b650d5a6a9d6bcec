"""Model families of another package: copies of three of ours, which give the same bits."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jengine.models
import jengine.vision
from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.setup import program_set
from jengine.engine.setup.program_set import make_children
from jengine.engine.start import start_engine
from jengine.execution.compile_children import CompileChildren, Target
from jengine.execution.sources import outside_digest
from jengine.models import Family, build, register
from jengine.models.layers import param
from jengine.models.llama import Llama, read_llama
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, prompts, run
from tests.engine.test_images_families import OPTIONS, answer, started
from tests.golden.weights import VARIANTS, max_model_len, write_model

COPIES = {"olmoe": "olmo", "qwen3_next": "qwen3_next", "qwen3_vl": "qwen"}  # and their files
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=5)
VISION = "from jengine.vision.qwen import Qwen3Vision\nclass Vision(Qwen3Vision):\n    pass\n"


@pytest.fixture
def package(families: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with copies of our families, under other names."""
    site, [models] = tmp_path / "site", jengine.models.__path__
    (package := site / "copied_families").mkdir(parents=True)
    (info := site / "copied_families-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: copied_families\nVersion: 1.0\n")
    lines = ["[jengine.families]"]
    for name, file in COPIES.items():
        (package / f"{file}.py").write_bytes(Path(models, f"{file}.py").read_bytes())
        lines.append(f"copied_{name} = copied_families:{name}")
    lines += ["broken = copied_families:nothing", "[jengine.images]"]
    (info / "entry_points.txt").write_text(
        "\n".join([*lines, "copied_qwen3_vl = copied_families.vision:Vision"])
    )
    (package / "vision.py").write_text(VISION)
    (package / "__init__.py").write_text(
        "".join(
            f"from copied_families.{file} import FAMILIES as of_{file}\n{name} = of_{file}[{name!r}]\n"
            for name, file in COPIES.items()
        )
    )
    monkeypatch.syspath_prepend(site)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]


def engine_of(folder: Path, variant: str, **options: Any) -> Engine:
    config = EngineConfig.of(str(folder), {**SMALL, "max_model_len": max_model_len(variant), **options})
    with on_demand(optimized=True):
        return start_engine(config, progress=False)[0]


def bits(answers: list[Answer]) -> list[Any]:
    return [[(update.token, update.logprobs) for update in answer.updates] for answer in answers]


def renamed(folder: Path, variant: str) -> Path:
    """A copy of a model's folder, as a model of the package's family."""
    copy = folder.with_name("copied")
    shutil.copytree(folder, copy)
    config = json.loads((file := copy / "config.json").read_text())
    file.write_text(json.dumps({**config, "model_type": f"copied_{variant}"}))
    return copy


@pytest.mark.parametrize("variant", ["olmoe", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_a_copied_family_gives_the_same_bits(variant: str, package: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "ours", variant)
    ours = engine_of(tmp_path / "ours", variant)
    copied = engine_of(renamed(tmp_path / "ours", variant), variant)
    work = [(prompt, PARAMS) for prompt in prompts(4, vocab=60, longest=100)]
    expected = bits(run(ours, work))
    assert bits(run(copied, work)) == expected and len(expected[0]) == 12
    # saved programs depend on the package's source
    spec = copied.runner.spec
    identity = spec.identity()
    assert "family" not in ours.runner.spec.identity()
    with (package / f"{COPIES[variant]}.py").open("a") as file:
        file.write("# another version\n")
    assert spec.identity()["family"] != identity["family"]


@pytest.mark.full
def test_a_copied_family_reads_images(package: Path, tmp_path: Path) -> None:
    ours, prompt, images = started(tmp_path / "ours", "qwen3_vl", batch_invariant=True)
    expected = answer(ours, prompt, images, PARAMS)
    options = {**OPTIONS, "batch_invariant": True}
    copied = engine_of(renamed(tmp_path / "ours", "qwen3_vl"), "qwen3_vl", **options)
    assert bits([answer(copied, prompt, images, PARAMS)]) == bits([expected])


def test_families_are_registered_once(package: Path) -> None:
    fields = {**VARIANTS["llama_gqa"], "model_type": "mine"}
    with pytest.raises(ModelError, match=r"model_type 'mine' is not supported; .*llama"):
        model_config(fields)
    family = Family("Mine", Llama, read_llama)
    register("mine", family)
    register("mine", family)
    assert model_config(fields).family == "mine"
    with pytest.raises(InvalidArgument, match="model_type='mine': is that of Mine"):
        register("mine", Family("Another", Llama, read_llama))
    with pytest.raises(InvalidArgument, match=r"must be a jengine\.models\.Family"):
        register("other", Llama)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"jengine\.families: broken = copied_families:nothing fails"):
        model_config({**fields, "model_type": "broken"})


class Forgetful(Llama):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.layers[1].attention


class Undeclared(Llama):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = type(param((1,), "float32", (None,)))(1.0)


class Headless(Llama):
    @property
    def logits(self) -> Any:
        raise AttributeError("logits")


@pytest.mark.parametrize(
    ("module", "change", "message"),
    [
        (Forgetful, {}, r"mine: layers\[1\] has no `attention` that declares its `cache`"),
        (Undeclared, {}, r"mine: the parameter scale must be declared by layers\.param"),
        (Headless, {}, r"mine: Headless has no `logits`: hidden states -> logits"),
        (Llama, {"hidden_size": ...}, "mine: its reader gives no hidden_size, which ModelConfig needs"),
        (Llama, {"hiden": 3}, "mine: its reader gives hiden, which ModelConfig does not have"),
        (Llama, {"parts": (3,)}, r"mine: its reader gives int, not one of Family\.parts"),
    ],
)
def test_what_a_family_forgot_is_named(
    module: Any, change: dict[str, Any], message: str, package: Path
) -> None:
    def read(fields: Any) -> dict[str, Any]:
        return {name: value for name, value in {**read_llama(fields), **change}.items() if value is not ...}

    register("mine", Family("Mine", module, read))
    with pytest.raises(ModelError, match=message):
        build(model_config({**VARIANTS["llama_gqa"], "model_type": "mine"}), "float32", 64)


def test_what_is_defined_without_a_file_is_another_program_in_each_process() -> None:
    assert outside_digest([Llama]) == ""
    known, session = outside_digest([Forgetful]), type("InNotebook", (Llama,), {"__module__": "__main__"})
    assert known == outside_digest([Forgetful, Llama]) != outside_digest([session])


def test_other_processes_compile_no_family_of_main(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def children(module: str) -> object:
        model: Any = SimpleNamespace(types={type("Local", (Llama,), {"__module__": module})})
        return make_children(EngineConfig(model="demo"), [gpu], model)

    gpu: Any = SimpleNamespace(platform="gpu", device_kind="H200")
    monkeypatch.setattr(program_set, "children_count", lambda threads, available: 1)
    monkeypatch.setattr(program_set.Target, "of", lambda devices: Target("h200", 1, 1 << 30))
    assert isinstance(children("a_package"), CompileChildren)
    assert children("__main__") is None
    assert "__main__ defines the model's family, which other processes cannot import" in caplog.text
