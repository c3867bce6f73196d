"""Sampling: prefill, decode, log-probs, and the record that guides training."""
