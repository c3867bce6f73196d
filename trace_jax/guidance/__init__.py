"""The paper's idea: rounding guided by what the rollout rounded to, as data."""
