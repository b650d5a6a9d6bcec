"""Number formats supported by a CPU's products."""

INPUTS = "bfloat16", "float32"  # of activations
WEIGHTS = *INPUTS, "int8", "float8_e4m3fn"
