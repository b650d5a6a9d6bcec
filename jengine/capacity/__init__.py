"""What a model and its traffic need, before and after there is a machine for it."""
