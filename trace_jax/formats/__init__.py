"""Number formats: E2M1 and E4M3 codes, NVFP4 and MX blocks, packing. Knows nothing of models."""
