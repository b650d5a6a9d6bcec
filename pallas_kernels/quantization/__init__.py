"""Quantized arrays: how numbers in eight and four bits are stored, and conversions from floats."""
