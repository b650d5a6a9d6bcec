"""jengine as the sampler of SkyRL's Tinker backends (the extra `skyrl`)."""
