"""Matrix products by weights of any format. `weights` finds the format of a parameter; the format chooses
between XLA and kernels.
"""
