"""What a run leaves behind, and how to read it: the run directory, and figures drawn from it."""
