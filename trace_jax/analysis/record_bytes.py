"""Bytes of guidance a token, by encoding and by the layers guided, from a model's sizes alone."""

from collections.abc import Mapping

from trace_jax.guidance import record
from trace_jax.guidance.encoding import ENCODINGS, row_bytes
from trace_jax.guidance.policy import Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig

SHARES = ("all", "latter_half", "latter_quarter", "latter_eighth")


def of_recording(recording: Recording, cfg: ModelConfig, quantized: Policy) -> int:
    """Bytes that a Recording keeps of one token, over all its layers."""
    sites = architecture.sites(cfg)
    return sum(
        len(layers)
        * sites[site].rows
        * row_bytes(recording.encoding, sites[site].width, quantized.fmt(site))
        for site, layers in recording.layers
    )


def values(recording: Recording, cfg: ModelConfig) -> int:
    """Values of one token that a Recording covers, over all its layers."""
    sites = architecture.sites(cfg)
    return sum(len(at) * sites[site].rows * sites[site].width for site, at in recording.layers)


def table(cfg: ModelConfig, quantized: Policy, patterns: tuple[str, ...]) -> list[dict]:
    """A row for each encoding: bits a value, and bytes a token by the share of layers guided."""
    rows = []
    for encoding in ENCODINGS:
        row: dict = {"encoding": encoding}
        for share in SHARES:
            recording = record.recording(
                encoding, patterns, share, architecture.site_layers(cfg), quantized
            )
            row[share] = of_recording(recording, cfg, quantized)
            row.setdefault("bits", 8 * row[share] / values(recording, cfg))
        rows.append(row)
    return rows


def markdown(rows: list[Mapping]) -> str:
    """The rows as a table."""
    lines = [
        "| encoding | bits a value, scales included | " + " | ".join(SHARES) + " |",
        "|---" * (len(SHARES) + 2) + "|",
    ]
    for row in rows:
        cells = (f"{row[share]:,}" for share in SHARES)
        lines.append(f"| {row['encoding']} | {row['bits']:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
