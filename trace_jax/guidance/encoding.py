"""What a rollout keeps of the tensors it quantizes: encodings by name, and the Guide they make.

    name      a value   a block scale  what the trainer can restore
    codes     4 bits    recorded       the code, wherever it lies in the trainer's own bracket
              (8 of E4M3)
    low2      2 bits    recorded       nearly the same
    low1      1 bit     recorded       the code, while the two sides are less than a code apart: the
                                       paper's compact record
    scales    nothing   recorded       the scale only; codes round to nearest in it (an ablation)
    bits      1 bit     nothing        low bits under the trainer's own scales (an ablation)
    syndrome  3/16 bit  1 bit          as low1, while errors are few (guidance/syndrome.py)
    hash      16 bits a row            nothing; says whether a row was restored exactly
syndrome2, syndrome4 and syndrome6 keep 2, 4 and 6 checks for 16 values. A row's checks and scale
parities fill whole bytes: what is left over in the last goes to further checks. Rows shorter than
128 values, where codes are weak, take a byte for 16 values whatever the name. NVFP4's outer scale
is float32, one a row, wherever scales are kept in any form. No syndrome serves 4/6 or MXFP8.
Source: TRACE (arXiv 2610.07767) section 3.2 for codes and low1.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import bits, block_scaled, e2m1
from trace_jax.formats.block_scaled import FORMATS, BlockScaled
from trace_jax.guidance import syndrome

RECORDED, PARITY, OWN = "recorded", "parity", "own"


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What is kept of each value and of each block scale."""

    bits: int = 0  # the low bits of a code, as they are; at most what it has
    checks: int = 0  # parity checks over the low bits, for each 16 values
    scales: str = RECORDED  # RECORDED, PARITY (the low bit of the scale's code) or OWN (nothing)


HASH = "hash"
ENCODINGS = {
    "codes": Encoding(bits=8),
    "low1": Encoding(bits=1),
    "low2": Encoding(bits=2),
    "scales": Encoding(),
    "bits": Encoding(bits=1, scales=OWN),
    "syndrome": Encoding(checks=3, scales=PARITY),
    "syndrome2": Encoding(checks=2, scales=PARITY),
    "syndrome4": Encoding(checks=4, scales=PARITY),
    "syndrome6": Encoding(checks=6, scales=PARITY),
}
# Formats of which parities say too little.
NO_CHECKS = {
    "nvfp4_4over6": "the parity of a block scale does not tell mapping to 4 from mapping to 6",
    "mxfp8": "of E4M3's fine codes more differ than parity checks restore",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide:
    """What a rollout keeps of a BlockScaled [..., n]. All-zero padding decodes to zeros.

    (Not with "bits", which keeps no scale.)
    """

    bits: jax.Array | None  # uint8 [..., bytes]: low bits of each code, or checks and parities
    scales: jax.Array | None  # the rollout's block scales [..., n/16], where recorded
    outer: jax.Array | None  # the rollout's outer scale float32, a prefix of the leading axes
    fmt: str = dataclasses.field(metadata=dict(static=True))
    encoding: str = dataclasses.field(metadata=dict(static=True))


def check_encoding(encoding: str, fmt: str = "") -> str:
    """encoding itself. Raises ValueError, listing the choices, when no trainer can follow it.

    fmt: what it is to be kept of, where that is known.
    """
    if encoding not in ENCODINGS:
        raise ValueError(
            f"unknown guidance encoding {encoding!r}: choose one of {sorted(ENCODINGS)}"
        )
    if fmt in NO_CHECKS and ENCODINGS[encoding].checks:
        others = sorted(name for name, of in ENCODINGS.items() if not of.checks)
        raise ValueError(
            f"guidance encoding {encoding!r} does not serve {fmt}: {NO_CHECKS[fmt]}; "
            f"choose one of {others}"
        )
    return encoding


def bits_of(encoding: str, fmt: str) -> int:
    """Low bits that are kept of each code, as they are."""
    return min(ENCODINGS[encoding].bits, FORMATS[fmt].element.BITS)


def checks_of(encoding: str, width: int, fmt: str) -> int:
    """Parity checks of a row of `width` values."""
    parities = width // FORMATS[fmt].block
    if width < syndrome.LONG:
        return 8 * width // 16 - parities
    wanted = ENCODINGS[encoding].checks * width // 16 + parities
    return -(-wanted // 8) * 8 - parities


def row_bytes(encoding: str, width: int, fmt: str) -> int:
    """Bytes that a Guide takes for a row of `width` values with an outer scale of its own."""
    if encoding == HASH:
        return 2
    of, blocks = ENCODINGS[check_encoding(encoding, fmt)], width // FORMATS[fmt].block
    outer = 4 if FORMATS[fmt].outer and of.scales != OWN else 0
    scales = blocks if of.scales == RECORDED else 0
    if of.checks:
        return (checks_of(encoding, width, fmt) + blocks) // 8 + outer
    return width * bits_of(encoding, fmt) // 8 + scales + outer


def encode(q: BlockScaled, encoding: str) -> Guide:
    """The Guide that the rollout keeps of q. Raises ValueError for an unknown encoding."""
    if encoding == HASH:
        return Guide(_hash(q), None, None, q.fmt, encoding)
    of = ENCODINGS[check_encoding(encoding, q.fmt)]
    kept, bits_kept = None, bits_of(encoding, q.fmt)
    if of.checks:
        kept = _syndrome(q, checks_of(encoding, q.shape[-1], q.fmt))
    elif bits_kept == q.element.BITS:
        kept = q.codes
    elif bits_kept:
        kept = _packed_low_bits(q, bits_kept)
    scales = q.scales if of.scales == RECORDED else None
    return Guide(kept, scales, None if of.scales == OWN else q.outer, q.fmt, encoding)


def _packed_low_bits(q: BlockScaled, kept: int) -> jax.Array:
    """The low `kept` bits of each code, in whole bytes."""
    mask, fields = jnp.uint8(2**kept - 1), q.codes
    if q.element.BITS == 4:  # the two of a byte side by side
        fields = (fields & mask) | ((fields >> 4) & mask) << kept
        return e2m1.pack_bits(fields, 2 * kept)
    return e2m1.pack_bits(fields & mask, kept)


def _syndrome(q: BlockScaled, m: int) -> jax.Array:
    """The m checks over the codes' low bits, then the parities of the scales, in whole bytes."""
    checks = syndrome.parities(block_scaled.unpack(q) & 1, m)
    return e2m1.pack_bits(jnp.concatenate([checks, bits.hold(q.scales) & 1], axis=-1), 1)


def read_syndrome(guide: Guide, width: int) -> tuple[jax.Array, jax.Array]:
    """(checks uint8 [..., m], parities of the block scales uint8 [..., width/b]) of a Guide."""
    m = checks_of(guide.encoding, width, guide.fmt)
    fields = e2m1.unpack_bits(guide.bits, 1)
    return fields[..., :m], fields[..., m:]


def _hash(q: BlockScaled) -> jax.Array:
    """16 bits of each row, uint8 [..., 2]: sum of codes, scales and outer scale times odd numbers.

    A row in which one code or scale differs has another hash for certain, any other row but by a
    chance of 1 in 2^15.
    """
    total = _weighted(block_scaled.unpack(q), 1) + _weighted(bits.hold(q.scales), 2)
    if q.outer is not None:
        word = jax.lax.bitcast_convert_type(q.outer, jnp.uint32)
        outer = (word ^ (word >> 16)) * jnp.uint32(0x9E3779B1)
        total = total + block_scaled.expand_prefix(outer, total.ndim)
    return jnp.stack([total & 0xFF, total >> 8 & 0xFF], axis=-1).astype(jnp.uint8)


def _weighted(values: jax.Array, salt: int) -> jax.Array:
    place = np.arange(1, values.shape[-1] + 1, dtype=np.uint64) * 2654435761 * salt
    factors = ((place ^ (place >> 15)) * 2246822519 >> 8 | 1).astype(np.uint32)
    return jnp.sum(values.astype(jnp.uint32) * factors, axis=-1, dtype=jnp.uint32)
