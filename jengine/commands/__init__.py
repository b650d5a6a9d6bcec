"""The commands of `jengine`, one file each. `add` declares a command's arguments and sets the function to
run.
"""
