"""Which requests run in a step; pages, costs and strategies."""
