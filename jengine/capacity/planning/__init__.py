"""Predicts memory, number of sequences and speed of a model on a device that need not be present."""
