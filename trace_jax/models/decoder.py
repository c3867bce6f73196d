"""The decoder: one forward for prefill, decode and training, for every family.

What differs between the three is data: whether a cache comes in, whether guidance comes in
(training) or is recorded (rollout), whether a weight leaf is a master array or packed FP4.

    x = embed(tokens);  each layer: x += mixer(norm(x)), x += feed_forward(norm(x));  head(norm(x))
The mixer is attention or a DeltaNet, the feed-forward block experts or dense, as the architecture
says; hyper-connections replace the residual and its norms (hyper_connection.py).

The residual stream, norms, router, softmax and logits are float32; matrix products take operands in
the compute dtype. Layers are stacked by group and scanned, so compile time does not grow with
depth; the cache is carried through the scan and written in place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats.block_scaled import BlockScaled, Operand, to_compute
from trace_jax.guidance import record
from trace_jax.guidance.encoding import Guide
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.record import Guidance, LayerGuide, Recording
from trace_jax.guidance.stacked import at_row, row_among
from trace_jax.kernels.matmul import float32_einsum, matmul
from trace_jax.models import architecture, parameters
from trace_jax.models import cache as caches
from trace_jax.models.architecture import ATTENTION, LayerKind, ModelConfig, Segment
from trace_jax.models.attention import Attention
from trace_jax.models.cache import Cache
from trace_jax.models.delta_net import DeltaNet
from trace_jax.models.experts import Experts
from trace_jax.models.hyper_connection import HyperConnection, tile
from trace_jax.models.layer_context import EngineNoise, LayerContext
from trace_jax.models.mlp import MLP
from trace_jax.models.ngram_embedding import NgramEmbedding
from trace_jax.models.normalization import RMSNorm
from trace_jax.parallel.mesh import batch_shares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a forward returns."""

    logits: jax.Array  # float32 [B, T, V], or [B, V] where only the last real token was asked for
    cache: Cache | None  # with the new rows, where a cache came in
    recorded: tuple[Guidance, ...]  # one for each Recording asked for
    routes_LBTA: jax.Array | None  # int32, the routers' own choice of experts; None when dense


class Inputs(NamedTuple):
    """What every layer reads, beside the residual stream."""

    tokens_BT: jax.Array
    positions_BT: jax.Array
    length_B: jax.Array | None  # real tokens of this call, where the rest is padding
    guidance: Guidance | None
    noise: EngineNoise | None

    def guides(self, layer: jax.Array, among: tuple[int, ...]) -> dict[str, LayerGuide]:
        """What guides a layer, by site (Guidance.at_layer); nothing where no guidance came in."""
        return {} if self.guidance is None else self.guidance.at_layer(layer, among)


class DecoderLayer(nn.Module):
    """One layer: its mixer and its feed-forward block, each around the residual stream."""

    cfg: ModelConfig
    kind: LayerKind
    among: tuple[int, ...]  # the layers that these parameters are stacked over
    policy: Policy
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, cache: Cache | None, layer, replayed_BTA, inputs: Inputs):
        """(x, cache, the router's own choice [B, T, A] or None, what was quantized by site)."""
        cfg, kind, length_B = self.cfg, self.kind, inputs.length_B
        context = self.context(layer, inputs)

        def remembered(name, layers):
            """(this layer's part of the cache, what puts a new one in its place)."""
            if cache is None:
                return None, lambda new: None
            row = row_among(layers, layer)
            part = getattr(cache, name)
            put = lambda new: dataclasses.replace(cache, **{name: caches.with_row(part, row, new)})
            return at_row(part, row), put

        if kind.ngram:
            ordinal = cfg.ngram.layers.index(*self.among)
            before, put = remembered("ngram", cfg.ngram.layers)
            y, after = NgramEmbedding(cfg, ordinal, name="ngram")(
                x, inputs.tokens_BT, context, before, length_B
            )
            x, cache = x + y, put(after)

        mixer_layers = architecture.layers_with(cfg, kind.mixer)
        h_BTD, write = residual(cfg, "mixer_connection", "input_norm")(x, context)
        if kind.mixer == ATTENTION:
            row = row_among(mixer_layers, layer)
            y_BTD, cache, quantized = Attention(cfg, name="attention")(
                h_BTD, inputs.positions_BT, context, cache, row
            )
        else:
            before, put = remembered("delta", mixer_layers)
            y_BTD, after, quantized = DeltaNet(cfg, name="delta_net")(
                h_BTD, context, before, length_B
            )
            cache = put(after)
        x = write(y_BTD)

        h_BTD, write = residual(cfg, "feed_forward_connection", "post_attention_norm")(x, context)
        routes_BTA = None
        if cfg.num_experts:
            y_BTD, routes_BTA, more = Experts(cfg, name="experts")(h_BTD, context, replayed_BTA)
        else:
            y_BTD, more = MLP(cfg, cfg.intermediate_size, name="mlp")(h_BTD, context)
        quantized |= more
        if cfg.shared_expert_size:
            shared = MLP(cfg, cfg.shared_expert_size, output_gate=True, name="shared_expert")
            y_shared_BTD, more = shared(h_BTD, context)
            y_BTD, quantized = y_BTD + y_shared_BTD, quantized | more
        return write(y_BTD), cache, routes_BTA, quantized

    def context(self, layer: jax.Array, inputs: Inputs) -> LayerContext:
        """This layer's share of what came in."""
        noise = None if inputs.noise is None else inputs.noise.at_layer(layer)
        return LayerContext(self.policy, self.dtype, inputs.guides(layer, self.among), noise)


def residual(cfg: ModelConfig, connection: str, norm: str) -> Callable:
    """A function of (x, context): what a block reads, float32 [B, T, D], and how y is added to x.

    Called inside a compact method; hyper-connections, or the ordinary pre-norm residual.
    """
    if cfg.hyper_connection:
        return HyperConnection(cfg, name=connection)
    pre_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, cfg.zero_centered_norms, name=norm)
    return lambda x_BTD, _: (pre_norm(x_BTD), lambda y_BTD: x_BTD + y_BTD)


class Group(nn.Module):
    """One round of a segment's layers, as a scan wants it: (carry, inputs) -> (carry, outputs)."""

    cfg: ModelConfig
    segment: Segment
    policy: Policy
    dtype: jnp.dtype
    records: tuple[Recording, ...]

    @nn.compact
    def __call__(self, carry, first, replayed_PBTA, inputs: Inputs):
        """((x, cache), (recorded Guides and routes, each a list over the group's layers))."""
        x, cache = carry
        recorded, routes = [], []
        for position, kind in enumerate(self.segment.kinds):
            among = self.segment.layers_at(position)
            layer = DecoderLayer(self.cfg, kind, among, self.policy, self.dtype, name=f"{position}")
            replayed_BTA = None if replayed_PBTA is None else replayed_PBTA[position]
            x, cache, routes_BTA, quantized = layer(
                x, cache, first + position, replayed_BTA, inputs
            )
            recorded.append(tuple(one.encode(quantized) for one in self.records))
            routes.append(routes_BTA)
        return (x, cache), (recorded, routes)


class Decoder(nn.Module):
    """Embedding, scanned groups of layers, last norm and head."""

    cfg: ModelConfig
    policy: Policy = NOTHING
    dtype: jnp.dtype = jnp.float32
    records: tuple[Recording, ...] = ()

    @nn.compact
    def __call__(self, inputs: Inputs, cache: Cache | None, routes_LBTA) -> Output:
        """The Output of tokens [B, T]; arguments as of `forward`."""
        cfg, normal = self.cfg, nn.initializers.normal(self.cfg.initializer_range)
        shape, axes = (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")
        table = parameters.parameter(self, "embed", shape, axes, normal)
        x = to_compute(table, self.dtype)[inputs.tokens_BT].astype(jnp.float32)
        if cfg.hyper_connection:
            x = tile(x, cfg.hyper_connection.streams)

        recorded, routes = [], []  # by layer
        for segment in architecture.segments(cfg):
            size, repeats = len(segment.kinds), segment.repeats
            replayed = None
            if routes_LBTA is not None:
                replayed = routes_LBTA[segment.first : segment.first + size * repeats]
                replayed = replayed.reshape(repeats, size, *replayed.shape[1:])
            groups = nn.scan(
                Group,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, nn.broadcast),
                length=repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(cfg, segment, self.policy, self.dtype, self.records, name=segment.name)
            first = segment.first + size * jnp.arange(repeats)
            (x, cache), (recorded_here, routes_here) = groups((x, cache), first, replayed, inputs)
            recorded.append(recorded_here)
            routes.append(routes_here)

        if cfg.hyper_connection:
            plain = LayerContext(self.policy, self.dtype)
            x_BTD, _ = HyperConnection(cfg, inject=False, name="final_mixer")(x, plain)
        else:
            x_BTD = RMSNorm(
                cfg.hidden_size, cfg.rms_norm_eps, cfg.zero_centered_norms, name="final_norm"
            )(x)
        head = (
            table if cfg.tie_embeddings else parameters.parameter(self, "head", shape, axes, normal)
        )
        logits, guides = self.read_head(x_BTD, head, inputs)
        recorded.append([guides])
        present = architecture.site_layers(cfg)
        return Output(
            logits,
            cache,
            tuple(
                record.keep(one, by_site(recorded, index), present)
                for index, one in enumerate(self.records)
            ),
            by_layer(routes) if cfg.num_experts else None,
        )

    def read_head(
        self, x_BTD: jax.Array, head: jax.Array | BlockScaled | Operand, inputs: Inputs
    ) -> tuple[jax.Array, tuple[dict[str, Guide], ...]]:
        """Logits, and the head's recorded Guides [1, B, T, ...]."""
        last = self.cfg.num_layers - 1
        guides = inputs.guides(jnp.int32(last), (last,))
        noise = None if inputs.noise is None else inputs.noise.at_layer(last)
        context = LayerContext(self.policy, self.dtype, guides, noise)
        x, q = context.quantize("head/in", x_BTD)
        if inputs.length_B is not None:
            at = (jnp.arange(x_BTD.shape[0]), inputs.length_B - 1)
            x, x_BTD = jax.tree.map(lambda a: a[at], (x, x_BTD))
        fmt = self.policy.weight_fmt("head")
        if fmt or isinstance(head, BlockScaled | Operand):
            logits = matmul(x, parameters.read(head, fmt, self.dtype))
        else:
            head = to_compute(head, self.dtype).astype(jnp.float32)
            logits = float32_einsum("...D,VD->...V", x_BTD, head)
        recorded = tuple(one.encode({"head/in": q}) for one in self.records)
        return logits, jax.tree.map(lambda a: a[None], recorded)


def by_layer(segments: list[list[Any]]) -> Any:
    """A tree of arrays [layers, ...] in the order of layers.

    segments: for each segment and each position of its group a tree of arrays [repeats, ...].
    """

    def interleave(*positions):
        if len(positions) == 1:
            return positions[0]
        return jnp.stack(positions, axis=1).reshape(-1, *positions[0].shape[1:])

    parts = [jax.tree.map(interleave, *positions) for positions in segments]
    return jax.tree.map(lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *parts)


def by_site(recorded: list[list[tuple[dict[str, Guide], ...]]], index: int) -> dict[str, Guide]:
    """The Guides [layers of the site, B, T, ...] of one Recording, from those of every position."""
    mine = [[guides[index] for guides in positions] for positions in recorded]

    def of_site(site):
        having = [[guides[site] for guides in positions if site in guides] for positions in mine]
        return by_layer([positions for positions in having if positions])

    return {site: of_site(site) for positions in mine for guides in positions for site in guides}


def init(cfg: ModelConfig, key: jax.Array) -> dict:
    """Master parameters, float32, layers stacked on a leading axis."""
    return nn.unbox(_init(cfg, key))


def logical_axes(cfg: ModelConfig) -> dict:
    """The tree of parameters with each leaf's logical axes, a tuple of names."""
    boxed = jax.eval_shape(lambda key: _init(cfg, key), jax.random.key(0))
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    return jax.tree.map(lambda leaf: tuple(leaf.names), boxed, is_leaf=is_box)


def _init(cfg, key):
    tokens_BT = jnp.zeros((batch_shares(), 1), jnp.int32)
    inputs = Inputs(tokens_BT, tokens_BT, None, None, None)
    return Decoder(cfg).init(key, inputs, None, None)["params"]


def forward(
    params: dict,
    tokens_BT: jax.Array,
    cfg: ModelConfig,
    *,
    policy: Policy = NOTHING,
    dtype: jnp.dtype | None = None,
    positions_BT: jax.Array | None = None,
    length_B: jax.Array | None = None,
    cache: Cache | None = None,
    guidance: Guidance | None = None,
    routes_LBTA: jax.Array | None = None,
    records: tuple[Recording, ...] = (),
    noise: EngineNoise | None = None,
) -> Output:
    """Logits of tokens int32 [B, T], and what else was asked for.

    policy: sites to quantize (none by default); dtype: compute dtype (default: that of the
    embedding); positions_BT: default 0..T-1; length_B: how many tokens of each sequence are real,
    the rest being padding: logits come for the last of them only; cache: remember these tokens, at
    their positions, and attend over all it holds; guidance, routes_LBTA: a rollout's record to
    follow; records: what to keep of this forward's own rounding; noise: another engine's kernels.

    Raises ValueError where a record names a site that the policy does not quantize, for guidance of
    the experts' hidden rows without the routes that say whose rows they are, and, as far as they
    are known (outside jit), for tokens that the vocabulary lacks or the cache has no room for.
    """
    for one in records:
        if set(one.sites) - set(policy.sites):
            raise ValueError(
                f"recording {one.sites} needs these sites quantized; policy has {policy.sites}"
            )
    if guidance is not None and "experts/mid" in guidance.guides and routes_LBTA is None:
        raise ValueError(
            "guidance of 'experts/mid' lies in the order of the rollout's routes: replay them "
            "(routes_LBTA), or leave this site out of the record"
        )
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    if not isinstance(tokens_BT, jax.core.Tracer):
        check_tokens(tokens_BT, cfg)
    if cache is not None:
        caches.check_room(cache, tokens_BT, positions_BT)
    dtype = params["embed"].dtype if dtype is None else dtype
    model = Decoder(cfg, policy, jnp.dtype(dtype), records)
    inputs = Inputs(tokens_BT, positions_BT, length_B, guidance, noise)
    return model.apply({"params": params}, inputs, cache, routes_LBTA)


def check_tokens(tokens_BT: jax.Array, cfg: ModelConfig) -> None:
    """Raises ValueError for a token that the vocabulary lacks; the look-up would take another."""
    known_BT = np.asarray(tokens_BT)  # numpy's own: under jit, JAX would trace even the known
    low, high = known_BT.min(), known_BT.max()
    if low < 0 or high >= cfg.vocab_size:
        raise ValueError(
            f"tokens from {low} to {high}, but model.vocab_size={cfg.vocab_size} has 0 to "
            f"{cfg.vocab_size - 1}"
        )
