"""Kernels for a CPU: compiled for the processor at hand, called from XLA's programs as foreign functions (`calls.py`).

XLA's own forms of these read a CPU's memory at a fraction of its speed. Each call is computed by a team of threads (`team.py`). Compilers
are imported when the first kernel is wanted.
"""
