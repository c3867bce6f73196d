"""What each guidance encoding restores of single rows, by width and noise. No model is run.

    python -m experiments.restoration

Prints the share of the codes that the noise changes and guidance leaves changed. Takes 3 minutes on
2 cores.
"""

from trace_jax.analysis import restoration

if __name__ == "__main__":
    print(restoration.table())
