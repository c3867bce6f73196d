"""The hashed n-gram embedding (PLE): rows of a large table, gated into every residual stream.

    h_n = t_0 mu_0 xor ... xor t_{n-1} mu_{n-1}      t_k the token k back, for n = 2 ... size
    e = the table's rows (h_n mod prime_j) + offset_j of every head j, side by side
    gate_c = <norm(e Wk)_c, norm(X)_c> / sqrt(D);  gate <- sign(gate) sqrt(max(|gate|, 1e-6))
    G_c = sigmoid(gate_c) (e Wv);  added to the streams: G + silu(conv(norm(G)))
A token that lies before the start or beyond an end of text counts as end of text. Hashes have 64
bits, which JAX would silently truncate: here they are pairs of uint32. Source: qwen.md 2.7.

Letters: B sequences, T tokens, n tokens of the longest n-gram (n - 1 in a state), h heads, D model,
s streams, N = s D, W taps, P rows of the convolution's tail.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels.matmul import matmul
from trace_jax.models.architecture import ModelConfig, NgramConfig
from trace_jax.models.config import ngram_primes, ngram_rows
from trace_jax.models.convolution import causal_convolution
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.normalization import RMSNorm
from trace_jax.models.parameters import parameter, weight
from trace_jax.parallel.mesh import over_batch

Pair = tuple[jax.Array, jax.Array]  # the high and low half of 64 bits, uint32

GAMMA = 0x9E3779B97F4A7C15
SEED_STRIDE = 10007


def splitmix64(state: int) -> int:
    """The 64-bit value that the splitmix64 generator draws from a state. Source: Vigna, 2015."""
    mask = 2**64 - 1
    z = (state + GAMMA) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def multipliers(ngram: NgramConfig, vocab_size: int, ordinal: int) -> tuple[int, ...]:
    """mu_k of the `ordinal`-th layer with a table: odd, and its products with tokens below 2^63."""
    half = max(1, (2**63 - 1) // vocab_size // 2)
    seed = ngram.seed + SEED_STRIDE * ordinal
    states = [(seed + GAMMA * (k + 1)) % 2**64 for k in range(ngram.size)]
    return tuple(2 * (splitmix64(state) % half) + 1 for state in states)


def multiply(a: jax.Array, constant: int) -> Pair:
    """a (uint32) times a constant below 2^64, modulo 2^64."""
    high, low = jnp.uint32(constant >> 32), jnp.uint32(constant & 0xFFFFFFFF)
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, low & 0xFFFF, low >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    carry = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (carry >> 16) + a * high, a * low


def remainder(value: Pair, divisors: tuple[int, ...]) -> jax.Array:
    """A 64-bit value modulo each divisor, all below 2^31: uint32 [..., divisors].

    Horner's rule, so few bits at a time that nothing exceeds 32 bits.
    """
    high, low = (half[..., None] for half in value)
    room = 32 - max(divisors).bit_length()
    by = jnp.array(divisors, jnp.uint32)
    rest, left = high % by, 32
    while left:
        count = min(room, left)
        left -= count
        rest = ((rest << count) | ((low >> left) & ((1 << count) - 1))) % by
    return rest


def table_rows(
    window_BTn: jax.Array, ngram: NgramConfig, vocab_size: int, ordinal: int
) -> jax.Array:
    """The table's row of every head, int32 [B, T, h].

    window: each token (below vocab_size), then the tokens 1, 2, ... size - 1 back. The heads of
    pairs come first, then those of triples, and so on. ordinal: which layer with a table, from 0.
    """
    primes = ngram_primes(ngram, ordinal)
    offsets = np.cumsum((0, *primes[:-1])).astype(np.int32)
    crossed = jnp.zeros(window_BTn.shape[:-1], bool)
    high = low = jnp.zeros(window_BTn.shape[:-1], jnp.uint32)
    rows = []
    for back, multiplier in enumerate(multipliers(ngram, vocab_size, ordinal)):
        token = jnp.where(crossed, ngram.eos_id, window_BTn[..., back])
        product = multiply(token.astype(jnp.uint32), multiplier)
        high, low = high ^ product[0], low ^ product[1]
        if back:  # an end of text hides what is ahead of it, but not if it is the current token
            crossed |= token == ngram.eos_id
            own = slice((back - 1) * ngram.heads_per_ngram, back * ngram.heads_per_ngram)
            rows.append(remainder((high, low), primes[own]).astype(jnp.int32) + offsets[own])
    return jnp.concatenate(rows, axis=-1)


@jax.tree_util.register_static
class HostTable:
    """A table [rows, width] that stays in host memory, as an array or a memory map.

    It stands where the parameter tree has an array [repeats, rows, width], and has no leaves: what
    maps over the tree (optimizer, casts, transfers) does not see it and it is not trained. Compared
    by identity; a jitted function that saw it keeps it alive.
    """

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, width]."""
        return self.rows.shape

    def gather(self, rows: jax.Array) -> jax.Array:
        """The values of rows [...], fetched from the host, in the table's dtype [..., width]."""
        shape = jax.ShapeDtypeStruct((*rows.shape, self.shape[-1]), self.rows.dtype)
        fetch = lambda index: np.asarray(self.rows[np.asarray(index)])
        return jax.pure_callback(fetch, shape, rows, vmap_method="expand_dims")


def look_up(table: jax.Array | HostTable, rows_BTh: jax.Array) -> jax.Array:
    """The rows of a table, [B, T, h, width]."""
    if isinstance(table, HostTable):
        return over_batch(table.gather, rows_BTh)
    return table[rows_BTh]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramState:
    """What the embedding keeps of the tokens so far."""

    tokens_Bn: jax.Array  # int32, the last size - 1 tokens
    tail_BPN: jax.Array  # float32, the convolution's last inputs


def empty(cfg: ModelConfig, batch: int) -> NgramState:
    """The state ahead of the first token: ends of text, and zeros."""
    ngram = cfg.ngram
    tail = ((ngram.conv_size - 1) * ngram.size, cfg.hyper_connection.streams * cfg.hidden_size)
    return NgramState(
        jnp.full((batch, ngram.size - 1), ngram.eos_id, jnp.int32),
        jnp.zeros((batch, *tail), jnp.float32),
    )


class NgramEmbedding(nn.Module):
    """The n-gram embedding of one layer."""

    cfg: ModelConfig
    ordinal: int = 0  # which of the layers with a table this is

    @nn.compact
    def __call__(
        self,
        x_BTsD: jax.Array,
        tokens_BT: jax.Array,
        context: LayerContext,
        before: NgramState | None,
        length_B: jax.Array | None,
    ) -> tuple[jax.Array, NgramState]:
        """What to add to the streams, float32 [B, T, s, D], and the state after these tokens.

        before: the state to continue from (None: the start); length: of each sequence, how many of
        the T tokens are real, the others being right padding (None: all).
        Raises ValueError for a table of another shape than the config's.
        """
        cfg, ngram, std = self.cfg, self.cfg.ngram, self.cfg.initializer_range
        B, T, s, D = x_BTsD.shape
        N, width = s * D, ngram.embed_dim
        size = (ngram_rows(ngram, self.ordinal), ngram.row_width)
        table = parameter(self, "table", size, ("vocab", None), nn.initializers.normal(std))
        if table.shape != size:
            raise ValueError(
                f"ngram/table has shape {table.shape}, but model.ngram makes {size}; "
                "pass the table of this layer, its shards joined"
            )
        before = empty(cfg, B) if before is None else before
        history = jnp.concatenate([before.tokens_Bn, tokens_BT.astype(jnp.int32)], axis=1)
        window_BTn = jnp.stack([history[:, k : k + T] for k in reversed(range(ngram.size))], -1)
        rows_BTh = table_rows(window_BTn, ngram, cfg.vocab_size, self.ordinal)

        e = context.plain(look_up(table, rows_BTh).reshape(B, T, width))
        project = lambda name, size: matmul(
            e, weight(self, name, (size, width), (None, "embed"), context, std)
        )
        norm = lambda name, x_BTsD: RMSNorm(
            N, cfg.rms_norm_eps, cfg.zero_centered_norms, groups=s, name=name
        )(x_BTsD)
        key_BTsD = norm("key_norm", project("key", N).reshape(B, T, s, D))
        gate_BTs = jnp.sum(key_BTsD * norm("query_norm", x_BTsD), axis=-1) * D**-0.5
        gate_BTs = jnp.sign(gate_BTs) * jnp.sqrt(jnp.maximum(jnp.abs(gate_BTs), 1e-6))
        gated_BTsD = jax.nn.sigmoid(gate_BTs)[..., None] * project("value", D)[:, :, None]

        conv_NW = parameter(self, "conv", (N, ngram.conv_size), (None, None), nn.initializers.zeros)
        inputs_BTN = norm("conv_norm", gated_BTsD).reshape(B, T, N)
        local_BTN, tail_BPN = causal_convolution(
            inputs_BTN, conv_NW, before.tail_BPN, length_B, dilation=ngram.size
        )
        delta_BTsD = gated_BTsD + jax.nn.silu(local_BTN).reshape(B, T, s, D)
        return delta_BTsD, NgramState(_last(history, length_B, ngram.size - 1), tail_BPN)


def _last(history_BS, length_B, count):
    """The last `count` real tokens, where `count` earlier ones precede them in the history."""
    if length_B is None:
        return history_BS[:, -count:]
    return jnp.take_along_axis(history_BS, length_B[:, None] + jnp.arange(count), axis=1)
