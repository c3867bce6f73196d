"""Command-line modules: python -m experiments.NAME --config=configs/x.py --workdir=DIR."""
