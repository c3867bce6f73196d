"""Matrix products over FP4 operands. Two functions, used by every quantized layer."""
