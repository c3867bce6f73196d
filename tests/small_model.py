"""The model that most tests share: small, every structural feature present, values that spread.

Head groups, top-2 of 4 experts, widths of one or two FP4 blocks in either format. Norm scales are
random, so that leaving one out shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance import policy
from trace_jax.models import architecture, decoder
from trace_jax.models.architecture import ModelConfig

CFG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=32,
    rope_theta=1e4,
    initializer_range=0.25,
)
SITES = architecture.sites(CFG)
SITE_LAYERS = architecture.site_layers(CFG)
EVERYTHING = policy.resolve([("*", "nvfp4")], SITES)
DEFAULT = policy.resolve([("experts/*", "nvfp4"), ("attention/[kv]", "nvfp4")], SITES)


@functools.cache
def masters(cfg: ModelConfig = CFG, seed: int = 0) -> dict:
    """Float32 masters with random norm scales."""
    rng = np.random.default_rng(seed)

    def vary(path, leaf):
        return leaf * np.exp(0.3 * rng.normal(size=leaf.shape)) if path[-1].key == "scale" else leaf

    params = jax.jit(decoder.init, static_argnums=0)(cfg, jax.random.key(seed))
    varied = jax.tree_util.tree_map_with_path(vary, jax.device_get(params))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), varied)


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> jax.Array:
    """Random tokens int32 [batch, length], never 0; most tests take this shape, to compile once."""
    draw = np.random.default_rng(seed).integers(1, CFG.vocab_size, (batch, length))
    return jnp.asarray(draw, jnp.int32)


def _forward(params, tokens_BT, cfg=CFG, **arguments) -> decoder.Output:
    """decoder.forward, jitted below."""
    return decoder.forward(params, tokens_BT, cfg, **arguments)


STATIC = ("cfg", "policy", "dtype", "records")
# Compiles in half the time; for programs whose last bits no test looks at.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}
forward = jax.jit(_forward, static_argnames=STATIC)
quick_forward = jax.jit(_forward, static_argnames=STATIC, compiler_options=UNOPTIMIZED)
