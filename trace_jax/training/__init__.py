"""Train state, the guided step, weight packing and checkpoints."""
