"""What kernels for CPUs are built of: LLVM's intermediate representation, compiled for the local processor
and called from XLA's programs as foreign functions (`calls.py`).

XLA's own implementations achieve only a fraction of a CPU's memory bandwidth. Each call runs on several of
XLA's threads (`team.py`). Compilers are imported when the first kernel is needed.
"""
