"""Kernels for a CPU: compiled for the processor at hand, called from XLA's programs as foreign functions (`calls.py`).

XLA's own forms of these read a CPU's memory at a fraction of its speed. Each call is computed by several of XLA's threads (`team.py`).
Compilers are imported when the first kernel is wanted.
"""
