"""`jengine plan` without the extra aot, from arithmetic alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine import cli
from pallas_kernels import ahead_of_time

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(autouse=True)
def without_aot(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(target: str, count: int) -> None:
        raise NotImplementedError("as JAX does without the plugin")

    monkeypatch.setattr(ahead_of_time, "devices", devices)


def test_8b_on_an_h200(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-model-len=8192", "--max-num-seqs=32", "--max-num-batched-tokens=512"]
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", *sizes]) == 0
    text = capsys.readouterr().out
    assert "16,060,522,496" in text and "4,097 pages of 64 tokens, 8,388,608 bytes each" in text
    assert "an upper bound; --exact uses the compiler's figure" in text and "compiled for this plan" not in text
    assert text.endswith("The whole table has 41 programs. It fits.\n")


def test_a_batch_invariant_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--max-model-len=8192", "--batch-invariant"]) == 0
    assert capsys.readouterr().out.endswith("The whole table has 9 programs. It fits.\n")
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--tp=8", "--batch-invariant"]) == 2
    assert "batch_invariant=True: tensor_parallel_size=8: at most 2" in capsys.readouterr().err


def test_70b_needs_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "llama-3.1-70b")
    assert cli.main(["plan", model, "--target=h200", "--quiet"]) == 1
    assert capsys.readouterr().out.endswith("It does not fit.\n")
    assert cli.main(["plan", model, "--target=h200", "--tp=8", "--quiet"]) == 0
    assert "on 8 x NVIDIA H200" in capsys.readouterr().out


def test_exact_needs_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DATA / "llama-3.1-8b"), "--target=h200", "--exact"]) == 2
    assert "needs pip install 'jax-cuda13-plugin" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["compile", "--out=somewhere"]])
def test_a_target_that_does_not_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, str(DATA / "llama-3.1-8b"), "--target=h20"]) == 2
    assert capsys.readouterr().err == "jengine: error: target='h20': must be one of a100, h100, h200, l4\n"
