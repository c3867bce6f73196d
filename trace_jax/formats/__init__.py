"""FP4 number formats: E2M1 codes, NVFP4 and MXFP4 blocks, packing. Knows nothing of models."""
