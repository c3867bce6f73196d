"""Sweeps: many runs of the main job, resumable, on this machine or a cluster, and their report."""
