"""Reinforcement learning: tasks, rewards, batches, advantages, losses, queue and loop."""
