"""jengine as the rollout engine of Tunix (the extra `tunix`)."""
