"""Images: how each family's are cut and encoded, and how they are read and checked."""
