"""The paper's own setting: FP4 experts, K and V; their inputs guided in the latter half of layers.

    python -m experiments.guidance_bytes --config=configs/paper_sites.py:qwen3_5_35b_a3b
    python -m experiments.mismatch --config=configs/paper_sites.py --workdir=runs/paper_sites

Source: TRACE (arXiv 2610.07767), as method.md 1.5 and 1.8 read it.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu


def get_config(model: str | None = None) -> ConfigDict:
    """tiny_cpu, or a named model, with the paper's FP4 sites and layers."""
    config = tiny_cpu.get_config(model)
    config.quantize = (("experts/*", "nvfp4"), ("attention/[kv]", "nvfp4"))
    config.guidance.sites = ("experts/in", "attention/[kv]")
    config.guidance.layers = ""
    return config
