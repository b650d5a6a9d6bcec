"""`jengine plan` without the extra aot, from arithmetic alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jengine import cli
from pallas_kernels.compilation import ahead_of_time

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(autouse=True)
def without_aot(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(target: str, count: int, memory: int) -> None:
        raise NotImplementedError("as JAX does without the plugin")

    monkeypatch.setattr(ahead_of_time, "devices", devices)


def test_8b_on_an_h200(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-model-len=8192", "--max-num-seqs=32", "--max-num-batched-tokens=512"]
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", *sizes]) == 0
    text = capsys.readouterr().out
    assert "16,060,522,496" in text and "4,097 pages of 64 tokens, 8,388,608 bytes each" in text
    assert (
        "an upper bound; --exact uses the compiler's figure" in text and "compiled for this plan" not in text
    )
    assert text.endswith("The whole table has 18 programs. It fits.\n")


def test_a_batch_invariant_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--max-model-len=8192", "--batch-invariant"]
        )
        == 0
    )
    assert capsys.readouterr().out.endswith("The whole table has 9 programs. It fits.\n")
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--tp=8", "--batch-invariant"]) == 0


def test_8b_on_24_gb_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("L4", "rtx3090", "RTX 4090"):
        assert cli.main(["plan", str(DATA / "llama-3.1-8b" / "config.json"), "--target", target]) == 0
    text = capsys.readouterr().out
    assert text.count("It fits.") == 3 and "NVIDIA GeForce RTX 4090" in text and "limited by" in text
    assert text.count("Programs cannot be compiled for it ahead of time") == 1


def test_70b_needs_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "llama-3.1-70b")
    assert cli.main(["plan", model, "--target=h200", "--quiet"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r".*It does not fit\. Fits with --quantization int8 \((\d+\.\d) GiB of cache, ([\d,]+) tokens\); "
        r"or with --tensor-parallel-size 2 \(\d+\.\d GiB of cache on each device, [\d,]+ tokens\)\.",
        said,
    )
    assert found is not None, said
    assert cli.main(["plan", model, "--target=h200", "--quantization=int8", "--quiet"]) == 0
    assert capsys.readouterr().out.endswith("It fits.\n")
    assert cli.main(["plan", model, "--target=h200", "--tp=8", "--quiet"]) == 0
    assert "on 8 x NVIDIA H200" in capsys.readouterr().out


def test_exchanges_with_and_without_xlas_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """On four H100s a sum takes 7 us, not 10. An L4 has no NVLink, and invariant sums are all-gathers."""
    flags = ["plan", str(DATA / "llama-3.1-8b"), "--tensor-parallel-size=4", "--max-model-len=4096"]
    assert cli.main([*flags, "--target=h100"]) == 0
    text = capsys.readouterr().out
    _, table = text.split("decode, sequences  exchanges  with NCCL alone  step of context 1,024\n")
    alone = table.splitlines()[1].split()  # of one sequence: 65 sums, and the sampler's exchange
    assert alone == ["1", "0.47", "ms", "0.67", "ms", "2.03", "ms"]
    assert "NCCL's latencies, except for sums that XLA's kernels take," in text
    for other in (["--target=l4"], ["--target=h100", "--batch-invariant"]):
        assert cli.main([*flags, *other]) == 0
        text = capsys.readouterr().out
        assert "with NCCL alone" not in text and "take NCCL's latencies and" in text


def test_exact_needs_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--exact"]) == 2
    assert "needs pip install 'jengine[aot]'" in capsys.readouterr().err


def test_what_fits_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan with the settings that it names has the cache that it names."""
    device = ["--memory=19GiB", "--bandwidth=1.0TB/s", "--compute=165TFLOPS", "--quiet"]
    model = str(DATA / "llama-3.1-8b")
    assert cli.main(["plan", model, *device]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    settings = re.findall(
        r"with (--[^(]*) \((\d+\.\d) GiB of cache(?: on each device)?, ([\d,]+) tokens\)", said
    )
    assert {"--quantization", "--tensor-parallel-size"} < {
        setting.split()[0] for setting, _, _ in settings
    }, said
    for setting, size, tokens in settings[:2]:
        assert cli.main(["plan", model, *device, *setting.split()]) == 0
        [(cache, pages)] = re.findall(
            r"KV cache +(\d+\.\d+) +[\d,]+ +([\d,]+) pages of 64", capsys.readouterr().out
        )
        assert float(cache) == pytest.approx(float(size), abs=0.06)
        assert (int(pages.replace(",", "")) - 1) * 64 == int(tokens.replace(",", ""))


def test_targets_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "llama-3.1-8b")
    assert cli.main(["plan", model, "--target=h2000"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("jengine: error: target='h2000': must be one of a10, a100, a100-40gb, ")
        and "--memory" in said
    )
    assert cli.main(["compile", "--out=somewhere", model, "--target=rtx4090"]) == 2
    known = "a100, b200, h100, h200, l4, rtx3090, rtx5090"
    compiled = f"must be one of {known}, for which programs can be compiled without the device"
    assert capsys.readouterr().err == f"jengine: error: target='rtx4090': {compiled}\n"
    for flag in ("--exact", "--devices=2", "--traffic=1/1"):
        assert cli.main(["plan", model, flag]) == 2
        assert "needs --target NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "attention"),
    [("h200", "Hopper for"), ("b200", "Ampere (device=NVIDIA B200: "), ("t4", "XLA (device=Tesla T4: ")],
)
def test_the_implementation_of_each_operation_is_said(
    target: str, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--max-model-len=4096", "--dtype=float16", "--quantization=int8"]
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), f"--target={target}", *how]) in (0, 1)  # fits or not
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Kernels: ")]
    assert line.startswith(f"Kernels: {attention}")
    for operation in (
        "decode attention",
        "prefill attention",
        "KV writes",
        "page copies",
        "products of int8",
    ):
        assert operation in line


@pytest.mark.parametrize(
    ("target", "kernels"), [("rtx5090", "Ampere (device="), ("h200", "Ampere (group=16: ")]
)
def test_nvfp4_stays_in_four_bits(
    target: str, kernels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.1 8B as compressed-tensors writes it, with activations in four bits, which become bfloat16."""
    config, tiny = (
        json.loads((DATA / name / "config.json").read_text()) for name in ("llama-3.1-8b", "quantized/nvfp4")
    )
    config["quantization_config"] = tiny["quantization_config"]
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), f"--target={target}", "--max-model-len=4096"]) == 0
    said = capsys.readouterr().out
    assert "weights e2m1, activations bfloat16 (not float4" in said
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    outside = 2 * 2 * 128256 * 4096  # of embeddings and logits, in bfloat16
    [weights] = re.findall(r"^weights +\S+ +([\d,]+)$", said, re.MULTILINE)
    assert int(weights.replace(",", "")) == pytest.approx(matrices * (4 + 32 / 16) / 8 + outside, rel=1e-3)
    [products] = re.findall(r"(\w+ \([^;]*) for [^;]*products of int4", said)
    assert products.startswith(kernels)
