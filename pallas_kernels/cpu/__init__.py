"""Kernels for a CPU: compiled by Numba for the processor at hand, called from XLA's programs as foreign functions.

XLA's own forms of these read a CPU's memory at a fraction of its speed. Numba is imported when the first of them is wanted. XLA runs
one thread each of more than eight operations that wait, and fewer one after the other; so each kernel is called for
many parts of its work at once, which is how it comes to all cores.
"""
