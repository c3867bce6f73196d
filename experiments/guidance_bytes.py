"""Bytes of guidance a token for any model: every encoding, by the share of the layers guided.

    python -m experiments.guidance_bytes --config=configs/paper_sites.py:qwen3_5_35b_a3b

Nothing is run or written: the sizes decide. Each row of a site has its own float32 outer scale.
"""

from experiments import command_line
from trace_jax.analysis import record_bytes
from trace_jax.rl.settings import resolve


def main(config, workdir: str) -> None:
    """Prints the table."""
    settings = resolve(config)
    rows = record_bytes.table(settings.cfg, settings.quantized, tuple(config.guidance.sites))
    print(record_bytes.markdown(rows))


if __name__ == "__main__":
    command_line.run(main, workdir="")
