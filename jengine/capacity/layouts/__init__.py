"""Chooses how a model is spread over devices: predicts what each layout serves, and names the best."""
