"""Paged attention. `dispatch` and `latent` choose between `xla`, `cpu`, `ampere` and `hopper`."""
