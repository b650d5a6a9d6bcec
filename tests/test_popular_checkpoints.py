"""The documented share of popular checkpoints follows from the survey and the supported families."""

from __future__ import annotations

import json
from typing import Any

from popular_checkpoints import BEGIN, END, PAGE, SURVEY, judged, sentence, share


def group(*model_types: str, downloads: float = 1, **fields: Any) -> dict[str, Any]:
    return {"name": "", "model_types": model_types, "format": "safetensors", "downloads": downloads, **fields}


def test_the_page_has_the_share() -> None:
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == sentence(json.loads(SURVEY.read_text()))


def test_reasons() -> None:
    groups = judged(
        {
            "groups": [
                group("llama", "unheard_of"),
                group("llama", quantized=["awq", "nvfp4"]),
                group("opt", format="pickle"),
            ]
        }
    )
    assert [list(found.reasons.values()) for found in groups] == [
        [None, "the family is not supported"],
        ["nvfp4 is not read"],
        ["pickle files are not read"],
    ]


def test_the_sentence_claims_a_share_only_if_something_does_not_load() -> None:
    about = {"checkpoints": 2, "source": "a survey", "surveyed": "2026-11"}
    assert "all groups" in sentence({**about, "groups": [group("llama", downloads=1)]})
    some = sentence({**about, "groups": [group("llama", downloads=3), group("unheard_of", downloads=1)]})
    assert "at least 75 % of the downloads" in some


def test_share_is_a_range_where_a_group_loads_in_part() -> None:
    survey = {
        "groups": [
            group("llama", downloads=5),
            group("llama", "unheard_of", downloads=3),
            group("unheard_of", downloads=2),
        ]
    }
    assert share(judged(survey)) == (50, 80)
