"""jengine as the rollout engine of Tunix (the extra `tunix`): an engine (rollout.py), and what a checkpoint
calls the weights of Tunix's models (weights.py).
"""
