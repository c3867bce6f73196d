"""Qwen mixture-of-experts decoders: one forward for prefill, decode and training."""
