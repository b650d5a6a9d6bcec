"""What the `jengine` command can do, a file each: `add` declares a command's arguments, and says what runs."""
