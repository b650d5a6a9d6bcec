"""The commands of `jengine`, one file each. `add` declares the arguments and sets what runs."""
