"""Forms of a CPU's products: measured once, stored, and part of a program's identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.execution.kernels import product_forms, with_forms
from pallas_kernels.products import choice
from tests.execution.specs import make_spec


def test_forms_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, measured = make_spec(), []
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: measured.append(able) or "xla")
    first = product_forms(spec, tmp_path)
    assert measured and "xla" in first.values()
    count = len(measured)
    assert product_forms(spec, tmp_path) == first and len(measured) == count
    for file in (tmp_path / "products").iterdir():
        file.write_text("not json")
    assert product_forms(spec, tmp_path) == first and len(measured) > count


def test_other_forms_are_other_programs() -> None:
    spec = make_spec()
    forms = {"float32 * float32, more rows": "xla"}
    chosen = with_forms(spec, forms)
    assert chosen.fingerprint() != spec.fingerprint()
    assert chosen.identity()["product_forms"] == forms
