"""The sampling loop: prefill, then one token at a time through the FP4 cache, recording as it goes.

Sequences are right-padded, prompt and completion contiguous, each at its own length. Whatever a
token leaves behind (cache rows, guidance, routes, log-prob) is written at the token's own position,
so the record lines up with the tokens that training sees.

A sequence's draws come from a key folded with its id and position: its sample does not depend on
its place in the batch. Letters: B sequences, P prompt length, T = P + new tokens, L layers, A
experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from trace_jax.formats import bits
from trace_jax.guidance.policy import Policy
from trace_jax.guidance.record import Guidance, Recording
from trace_jax.models import cache as caches
from trace_jax.models import decoder, packing
from trace_jax.models.architecture import ModelConfig
from trace_jax.rollout import log_probs
from trace_jax.rollout.log_probs import Head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sampled sequences with all that training needs of them."""

    tokens_BT: jax.Array  # int32: prompt, completion with its stop token, padding
    prompt_length_B: jax.Array  # int32, tokens
    length_B: jax.Array  # int32, tokens: prompt and completion
    logp_BT: jax.Array  # float32, nats: of each completion token as it was drawn; 0 elsewhere
    routes_LBTA: jax.Array | None  # uint8 or uint16: experts chosen; None for a dense model
    guidance: Guidance | None  # the record that guides training
    audit: Guidance | None  # full codes of the first sequences, to measure mismatch by
    check: Guidance | None  # 16 bits of each row that guidance restores, to count those restored
    version: jax.Array  # int32: of the policy that sampled
    log_mass_BT: jax.Array | None = None  # float32, nats: what truncation kept; None without
    head: Head | None = None  # of the policy at each completion token, not truncated; 0 elsewhere

    @property
    def mask_BT(self) -> jax.Array:
        """Float32 [B, T]: 1 on completion tokens."""
        position_T = jnp.arange(self.tokens_BT.shape[1])
        completion = position_T >= self.prompt_length_B[:, None]
        return (completion & (position_T < self.length_B[:, None])).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Everything static about sampling: one compiled program for each value of it and shape."""

    cfg: ModelConfig
    policy: Policy  # what the rollout quantizes
    dtype: jnp.dtype
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    recording: Recording | None = None
    audit: Recording | None = None
    check: Recording | None = None
    unpack_once: bool = True  # hold the FP4 weights unpacked while sampling: faster, 4x their bytes
    top_p: float = 1.0  # draw from the most likely tokens that reach this probability
    top_k: int = 0  # draw from this many most likely tokens; 0: all
    head_tokens: int = 0  # of each distribution sampled from, kept with their log-probs

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(
        self,
        packed: dict,
        prompts_BP: jax.Array,
        prompt_length_B: jax.Array,
        key: jax.Array,
        sequence_id_B: jax.Array,
        temperature: jax.Array | float,
        version: jax.Array | int = 0,
    ) -> Rollout:
        """A Rollout of prompts int32 [B, P], right-padded, from weights as of `packing.pack`.

        Stops when every sequence has drawn a stop token or max_new_tokens.
        """
        if self.unpack_once:
            packed = packing.unpack(packed, self.dtype)
        B, P = prompts_BP.shape
        T = P + self.max_new_tokens
        key_B = jax.vmap(functools.partial(jax.random.fold_in, key))(sequence_id_B)

        cache = caches.empty(self.cfg, self.policy, B, T, self.dtype)
        positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))
        out = self._forward(packed, prompts_BP, positions_BP, cache, prompt_length_B)
        prompt = (out.recorded, self._route_ids(out.routes_LBTA))
        state = _State(
            tokens_BT=jnp.full((B, T), self.pad_id, jnp.int32).at[:, :P].set(prompts_BP),
            logp_BT=jnp.zeros((B, T), jnp.float32),
            log_mass_BT=jnp.zeros((B, T), jnp.float32) if self.truncates else None,
            head=self._empty_head(B, T),
            length_B=prompt_length_B,
            done_B=jnp.zeros((B,), bool),
            cache=out.cache,
            record=jax.tree.map(functools.partial(_make_room, length=T), prompt),
        )
        state = self._append(state, out.logits, key_B, temperature)

        def unfinished(carry):
            step, state = carry
            return (step < self.max_new_tokens) & ~jnp.all(state.done_B)

        def decode(carry):
            step, state = carry
            last_B = state.length_B - 1
            token_B1 = jnp.take_along_axis(state.tokens_BT, last_B[:, None], axis=1)
            one_B = jnp.ones_like(last_B)
            out = self._forward(packed, token_B1, last_B[:, None], state.cache, one_B)
            new = (out.recorded, self._route_ids(out.routes_LBTA))
            record = jax.tree.map(functools.partial(_write, position_B=last_B), state.record, new)
            state = dataclasses.replace(state, cache=out.cache, record=record)
            return step + 1, self._append(state, out.logits, key_B, temperature)

        _, state = jax.lax.while_loop(unfinished, decode, (jnp.int32(1), state))
        recorded, routes = jax.tree.map(
            lambda held, like: bits.restore(held, like.dtype), state.record, prompt
        )
        recorded = dict(zip(self._recordings, recorded, strict=True))
        return Rollout(
            state.tokens_BT, prompt_length_B, state.length_B, state.logp_BT, routes,
            *map(recorded.get, (self.recording, self.audit, self.check)),
            jnp.asarray(version, jnp.int32),
            state.log_mass_BT,
            state.head,
        )  # fmt: skip

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def _recordings(self) -> tuple[Recording, ...]:
        return tuple(r for r in (self.recording, self.audit, self.check) if r is not None)

    def _forward(self, packed, tokens_BT, positions_BT, cache, length_B):
        return decoder.forward(
            packed, tokens_BT, self.cfg, policy=self.policy, dtype=self.dtype,
            positions_BT=positions_BT, cache=cache, records=self._recordings,
            length_B=length_B,
        )  # fmt: skip

    def _empty_head(self, B, T):
        if not self.head_tokens:
            return None
        shape = (B, T, self.head_tokens)
        return Head(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def _route_ids(self, routes_LBTA):
        if routes_LBTA is None:
            return None
        return routes_LBTA.astype(jnp.uint8 if self.cfg.num_experts <= 256 else jnp.uint16)

    def _append(self, state, logits_BV, key_B, temperature):
        """The state with one more token for each sequence that is not done."""
        draw_B = jax.vmap(jax.random.fold_in)(key_B, state.length_B)
        token_B, logp_B, log_mass_B = log_probs.sample(
            logits_BV, draw_B, temperature, self.top_p, self.top_k
        )
        head = None
        if self.head_tokens:
            head = log_probs.head(logits_BV, self.head_tokens, temperature)
        row_B = jnp.arange(token_B.shape[0])
        past_end = state.tokens_BT.shape[1]  # where writes are dropped
        at = jnp.where(state.done_B, past_end, state.length_B)
        put = lambda held, new: held.at[row_B, at].set(new, mode="drop")
        stopped_B = jnp.isin(token_B, jnp.asarray(self.stop_ids))
        return dataclasses.replace(
            state,
            tokens_BT=put(state.tokens_BT, token_B),
            logp_BT=put(state.logp_BT, logp_B),
            log_mass_BT=jax.tree.map(put, state.log_mass_BT, log_mass_B),
            head=jax.tree.map(put, state.head, head),
            length_B=state.length_B + ~state.done_B,
            done_B=state.done_B | stopped_B,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    tokens_BT: jax.Array
    logp_BT: jax.Array
    log_mass_BT: jax.Array | None
    head: Head | None
    length_B: jax.Array
    done_B: jax.Array
    cache: caches.Cache
    record: tuple  # (recorded Guidance of each Recording, routes), arrays [L, B, T, ...]


def _make_room(prompt_LBP: jax.Array, length: int) -> jax.Array:
    """A buffer [L, B, length, ...] that holds the prompt's entries, zeros after them."""
    held = bits.hold(prompt_LBP)
    L, B, P = held.shape[:3]
    return jnp.zeros((L, B, length, *held.shape[3:]), held.dtype).at[:, :, :P].set(held)


def _write(rows_LBT: jax.Array, new_LB1: jax.Array, position_B: jax.Array) -> jax.Array:
    """rows with one token's entry written at each sequence's position, of those that new holds."""
    sequences = new_LB1.shape[1]
    return rows_LBT.at[:, jnp.arange(sequences), position_B[:sequences]].set(
        bits.hold(new_LB1[:, :, 0])
    )
