"""Sweeps over configurations, for experiments.sweep."""
