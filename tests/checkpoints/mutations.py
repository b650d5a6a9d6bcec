"""Files of models that are changed at random: bytes, JSON values and kinds of files. Readers read them, or
raise an error that names the file; nothing else, and not slowly.

`python -m tests.checkpoints.mutations COUNT [KIND ...]` prints how many were read and refused.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jengine.api.loras import lora_tokenizer
from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.checkpoints import (
    choose_embedder,
    convert,
    load,
    read_config,
    read_reranker,
    read_sampling_defaults,
    resolve,
)
from jengine.checkpoints.encoder import load_encoder
from jengine.checkpoints.lora import read_lora
from jengine.core.lora import LoraSource
from jengine.execution.loras import LoraShapes
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.text.tokenizer import Tokenizer, has_tokenizer
from jengine.vision.declared import Encoder
from jengine.vision.folder import vision_of
from tests.checkpoints.gguf_models import write_gguf
from tests.checkpoints.quantized_models import awq, fp8, int8, write_quantized
from tests.golden.embedding_models import write_embedder
from tests.golden.loras import lora, write_lora
from tests.golden.pictures import PICTURES
from tests.golden.weights import write_model
from tests.text import conftest, test_tekken
from tests.text.test_gguf_tokenizer import described

SECONDS = 5.0  # that a file may take
EVEN = {"hidden_size": 64, "intermediate_size": 128}  # whole blocks of quantized numbers
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 255, 4097, 2**31 - 1, 2**31, -(2**31), 2**63, 2**70, 10**90, 0.0, -0.5, 0.3, 1e308),
    *(None, True, False, "", "x", "../x", "\ud800", "\x00", "x" * 100_000, [], {}, [[]], {"": {}}),
    *([0] * 1000, [1, 2], ["a"], [None], {"x": 1}, "float16", "int8", float("nan"), float("inf")),
)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        }
    },
    "ignore": ["lm_head"],
}
DEEP = "[" * 50_000 + "]" * 50_000


class Kind(NamedTuple):
    """Files of one kind.

    Attributes:
        write: writes valid ones into an empty folder.
        read: reads all that is in a folder.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]


class TooSlow(Exception):
    """A file took much too long."""


# --- what is read ---------------------------------------------------------------------------------


def read_model(folder: Path) -> None:
    path = resolve(str(folder))
    config = read_config(path)
    read_sampling_defaults(path)
    if not is_gguf(path):
        choose_embedder(None, path, config.hidden_size)
        read_reranker(path)
    model = build(config, "float32", 64)
    load(path, model, make_mesh(1), progress=False)
    if not is_gguf(path) and (vision := vision_of(path, lambda text: [0])) is not None:
        encoder = Encoder.of(vision, "float32")
        load_encoder(path, model_placed(encoder.params), encoder.sources)


def model_placed(params: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(make_mesh(1), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), params)


def read_tokenizer(folder: Path) -> None:
    path = resolve(str(folder)) if any(folder.glob("*.gguf")) else folder
    if has_tokenizer(path):
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("the text 12"))
        assert tokenizer.chat_templates is not None


def read_adapter(folder: Path, shapes: list[LoraShapes] = []) -> None:  # noqa: B006 (made once)
    if not shapes:
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), "llama_gqa")
            model = build(read_config(Path(place)), "float32", 64)
        shapes.append(LoraShapes(model, make_mesh(1), 2, 8))
    [one] = shapes
    read_lora(LoraSource("x", str(folder)), one.modules, one.model, 8, one.fused)
    lora_tokenizer(Tokenizer(conftest.byte_level()), folder)


# --- what is written -------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    conftest.write(conftest.byte_level(), folder)
    fields = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "model_max_length": int(1e30),
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def write_folder(variant: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder, variant)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 5}))
        if variant in PICTURES:
            (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES[variant].processor))

    return write


def write_shards(folder: Path) -> None:
    write_model(folder, "qwen3_tied")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    data = (folder / "model-00001-of-00001.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    places = {name: "model-00001-of-00001.safetensors" for name in header if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_converted(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place) / "in", "qwen3_moe")
        folder.rmdir()
        convert(str(Path(place) / "in"), folder, progress=False)


def write_gguf_model(folder: Path) -> None:
    fields = described(conftest.byte_level(), "gpt2", **{"ggml.pre": "gpt-2"})
    write_gguf(folder / "m.gguf", "llama_gqa", {"": "Q4_0"}, tokenizer=fields, **EVEN)


def write_adapter(folder: Path) -> None:
    write_lora(folder, lora("llama_gqa", "plain"))
    write_tokenizer(folder)


KINDS = {
    "gguf": [Kind(write_gguf_model, lambda folder: (read_model(folder), read_tokenizer(folder)))],
    "safetensors": [
        *(
            Kind(write_folder(variant), read_model)
            for variant in (
                "llama_gqa",
                "qwen3_moe",
                "qwen3_vl_moe",
                "gemma3_images",
                "deepseek_v3",
                "gemma3n",
            )
        ),
        Kind(write_shards, read_model),
        Kind(lambda folder: write_quantized(folder, AWQ, awq(32)), read_model),
        Kind(lambda folder: write_quantized(folder, INT8, int8), read_model),
        Kind(lambda folder: write_quantized(folder, FP8, fp8("blocks", "weight_scale_inv")), read_model),
        Kind(write_embedder, read_model),
    ],
    "adapters": [Kind(write_adapter, read_adapter)],
    "tokenizers": [Kind(write_tokenizer, read_tokenizer), Kind(test_tekken.write, read_tokenizer)],
    "converted": [Kind(write_converted, read_model)],
}


# --- mutations ---------------------------------------------------------------------------------------


def mutate(folder: Path, rng: random.Random) -> str:
    """Changes a file of the folder. Returns what it did, for errors."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    small = [file for file in files if file.suffix in (".json", ".safetensors", ".gguf", ".jinja")]
    file = rng.choice(small if rng.random() < 0.9 else files)
    how = rng.random()
    if how < 0.05:
        return f"{file.name} {_replace(file, rng)}"
    if file.suffix == ".json" and how < 0.85:
        return f"{file.name} {_edit(file, rng)}"
    if file.suffix == ".safetensors" and how < 0.6:
        return f"{file.name} {_edit_header(file, rng)}"
    return f"{file.name} {_garble(file, rng)}"


def _replace(file: Path, rng: random.Random) -> str:
    file.unlink()
    how = rng.choice(("missing", "pipe", "folder", "device", "empty", "loop"))
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "device":
        file.symlink_to("/dev/zero")
    elif how == "empty":
        file.touch()
    elif how == "loop":
        file.symlink_to(file.name)
    return how


def _edit(file: Path, rng: random.Random) -> str:
    text, did = _edited(file.read_text(encoding="utf-8"), rng)
    file.write_text(text, encoding="utf-8")
    return did


def _edit_header(file: Path, rng: random.Random) -> str:
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text, did = _edited(data[8:end].decode(), rng)
    file.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data[end:])
    return did


def _edited(text: str, rng: random.Random) -> tuple[str, str]:
    """A JSON text in which some values have been replaced."""
    try:
        value = json.loads(text)
    except ValueError:
        return text[: rng.randrange(len(text) + 1)], "cut"
    did = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = [*_places(value)]
        if not places:
            break
        parent, key = rng.choice(places)
        if rng.random() < 0.1:
            del parent[key]
            did.append(f"{key} deleted")
        elif rng.random() < 0.1 and isinstance(parent, dict):
            parent[str(rng.choice(VALUES))[:50]] = parent.pop(key)
            did.append(f"{key} renamed")
        else:
            new = "DEEP" if rng.random() < 0.03 else copy.deepcopy(rng.choice(VALUES))
            did.append(f"{key}={new!r:.60}")
            parent[key] = new
    return json.dumps(value).replace('"DEEP"', DEEP), ", ".join(did)


def _places(value: Any) -> Any:
    for key in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _garble(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    at = rng.randrange(min(len(data), rng.choice((64, 2000, len(data) or 1))) or 1)
    how = rng.choice(("bit", "byte", "number", "cut", "insert", "delete", "repeat"))
    if how == "bit" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif how == "byte" and data:
        data[at] = rng.randrange(256)
    elif how == "number":
        size = rng.choice((4, 8))
        number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10_000, 1_000_000))
        data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif how == "delete":
        del data[at : at + rng.randrange(1, 20)]
    else:
        data[at:at] = data[at : at + rng.randrange(1, 200)]
    file.write_bytes(data)
    return f"{how} at {at}"


def run(
    kinds: list[Kind], count: int, seed: int = 0, seconds: float = SECONDS, quiet: bool = True
) -> Counter[str]:
    """Reads this many changed copies.

    Raises:
        AssertionError: one raised something else than an error that names its file, or took too long.
    """
    rng, found, wrong = random.Random(seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        originals = []
        for number, kind in enumerate(kinds):
            (folder := Path(place) / f"original{number}").mkdir()
            kind.write(folder)
            kind.read(folder)
            originals.append(folder)
        for number in range(count):
            which = rng.randrange(len(kinds))
            folder = Path(place) / f"copy{number}"
            shutil.copytree(originals[which], folder)
            did = mutate(folder, rng)
            start = time.process_time()  # the machine may be busy
            error = _read(kinds[which], folder, 2 * seconds)
            took = time.process_time() - start
            outcome = "read" if error is None else "refused"
            if isinstance(error, ModelError | InvalidArgument):
                if str(folder) not in str(error) and did.split()[0] not in str(error):
                    outcome = "names no file"
            elif error is not None:
                outcome = "traceback"
            if took > seconds:
                outcome = "slow"
            found[outcome] += 1
            if outcome not in ("read", "refused"):
                wrong.append(
                    f"{number} {outcome} {took:.1f} s: {did}: {type(error).__name__}: {error!s:.300}"
                )
                if not quiet:
                    print(wrong[-1], flush=True)
            shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    return found


def _read(kind: Kind, folder: Path, seconds: float) -> BaseException | None:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            kind.read(folder)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


if __name__ == "__main__":
    for name in sys.argv[2:] or KINDS:
        begun = time.monotonic()
        try:
            counts = run(KINDS[name], int(sys.argv[1]), quiet=False)
            print(name, dict(counts), f"{time.monotonic() - begun:.0f} s", flush=True)
        except AssertionError as failed:
            print(
                name, "FAILED", str(failed).count("\n") + 1, f"{time.monotonic() - begun:.0f} s", flush=True
            )
