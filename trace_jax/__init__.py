"""trace_jax: FP4 reinforcement learning of language models with rollout-guided training (TRACE)."""
