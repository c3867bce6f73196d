"""Hugging Face checkpoints: their configs, names, tensors and quantization, read and written."""
