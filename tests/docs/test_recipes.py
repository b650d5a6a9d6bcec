"""The recipes' plans are those of today."""

from __future__ import annotations

import recipe_plans


def test_the_page_shows_what_plan_prints() -> None:
    text = recipe_plans.PAGE.read_text()
    assert len(recipe_plans.BLOCK.findall(text)) > 6
    assert recipe_plans.with_plans(text) == text, "run python tools/recipe_plans.py"
