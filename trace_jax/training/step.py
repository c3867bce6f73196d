"""The two training steps: guided reinforcement learning, and the supervised warm-up before it.

Both are one compiled function of (state, batch) with the state donated. The RL step runs the same
forward as the rollout over the same tokens; what the rollout recorded guides its rounding.

Letters: B sequences, T tokens, L layers, A chosen experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from trace_jax.guidance import mismatch
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import decoder
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl import gap, losses
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout
from trace_jax.training.state import TrainState

OLD_LOG_PROBS = (  # what the importance ratio is taken to
    "rollout",  # the policy that sampled: one ratio carries staleness, mismatch and learning alike
    "trainer",  # the trainer before its first update on the rollout: the ratio carries learning
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """A rollout with what its rewards came to."""

    rollout: Rollout
    advantage_B: jax.Array  # float32
    keep_B: jax.Array  # float32: 0 where the sequence's group is dropped from the loss
    noise_key: jax.Array  # of the emulated engine noise, unused without
    # float32, nats: the trainer's own before its first update on this rollout. None: those of the
    # update's own forward, which is right for the first one.
    old_logp_BT: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Everything static about training: one compiled program for each value of it and shape."""

    cfg: ModelConfig
    policy: Policy  # what the training forward quantizes
    dtype: jnp.dtype
    transformation: optax.GradientTransformation
    temperature: float
    replay_routes: bool
    clip_low: float
    clip_high: float
    ratio_cap: float
    old_log_probs: str = "rollout"  # one of OLD_LOG_PROBS
    audit: Recording | None = None
    engine_noise: float = 0.0  # relative, emulated (models/layer_context.py)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict]:
        """The state after one optimizer update on a batch, and metrics (scalars by name).

        Guidance is followed where the rollout carries it. Loss: the token mean over the batch.
        """
        (_, metrics), grads = jax.value_and_grad(self.loss, has_aux=True)(state.params, batch)
        updates, opt_state = self.transformation.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["train/grad_norm"] = optax.global_norm(grads)
        return dataclasses.replace(state, params=params, opt_state=opt_state), metrics

    def loss(self, params: dict, batch: TrainBatch) -> tuple[jax.Array, dict]:
        """GRPO loss (nats a token) of a batch and its metrics."""
        rollout = batch.rollout
        out = self.forward(params, rollout, self.noise(batch.noise_key))
        logp_BT, entropy_BT = log_probs.next_token_log_probs(
            out.logits, rollout.tokens_BT, self.temperature
        )
        mask_BT = rollout.mask_BT
        loss_sum, tokens, terms = losses.grpo(
            logp_BT,
            self.old_logp(logp_BT, batch),
            batch.advantage_B,
            mask_BT * batch.keep_B[:, None],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
        )
        tokens = jnp.maximum(tokens, 1)
        loss = loss_sum / tokens
        metrics = {name: total / tokens for name, total in terms.items()}
        metrics |= gap.gap_metrics(jax.lax.stop_gradient(logp_BT), rollout.logp_BT, mask_BT)
        metrics |= self.mismatch_metrics(out, rollout)
        metrics["train/loss"] = loss
        metrics["policy/entropy_nats"] = jnp.sum(entropy_BT * mask_BT) / jnp.sum(mask_BT)
        return loss, metrics

    @functools.partial(jax.jit, static_argnums=0)
    def with_old_log_probs(self, params: dict, batch: TrainBatch) -> TrainBatch:
        """The batch with its tokens' log-probs under params, which several updates compare with.

        They follow the batch's guidance where it carries any, as the updates on it will.
        """
        rollout = dataclasses.replace(batch.rollout, audit=None)  # nothing is compared here
        out = self.forward(params, rollout, self.noise(batch.noise_key))
        logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, self.temperature)
        return dataclasses.replace(batch, old_logp_BT=logp_BT)

    def old_logp(self, logp_BT: jax.Array, batch: TrainBatch) -> jax.Array:
        """The log-probs [B, T] that the importance ratio is taken to; no gradient."""
        if self.old_log_probs == "rollout":
            return batch.rollout.logp_BT
        return jax.lax.stop_gradient(logp_BT) if batch.old_logp_BT is None else batch.old_logp_BT

    def noise(self, key: jax.Array) -> EngineNoise | None:
        """The emulated noise of another engine, or None where there is none."""
        return EngineNoise(key, self.engine_noise) if self.engine_noise else None

    def forward(
        self, params: dict, rollout: Rollout, noise: EngineNoise | None = None
    ) -> decoder.Output:
        """The training forward over a rollout's tokens, following what it recorded."""
        return decoder.forward(
            params,
            rollout.tokens_BT,
            self.cfg,
            policy=self.policy,
            dtype=self.dtype,
            guidance=rollout.guidance,
            routes_LBTA=rollout.routes_LBTA if self.replay_routes else None,
            records=() if self.audit is None or rollout.audit is None else (self.audit,),
            noise=noise,
        )

    def mismatch_metrics(self, out: decoder.Output, rollout: Rollout) -> dict:
        """Routes against the rollout's, and codes, scales and activations where it was audited."""
        valid_BT, metrics = valid_inputs(rollout), {}
        if out.routes_LBTA is not None:
            ours_LBTAA = out.routes_LBTA[..., None] == rollout.routes_LBTA[..., None, :]
            shared_LBT = jnp.sum(ours_LBTAA, axis=(-1, -2)) / self.cfg.num_experts_per_token
            shared = jnp.sum(shared_LBT * valid_BT) / (jnp.sum(valid_BT) * self.cfg.num_layers)
            metrics["mismatch/route_rate"] = 1 - shared
        if not out.recorded:
            return metrics
        sites = mismatch.compare(out.recorded[0], rollout.audit, valid_BT[: self.audit.sequences])
        total = mismatch.add([m.total() for m in sites.values()])
        metrics["mismatch/code_rate"] = total.code_rate
        metrics["mismatch/scale_rate"] = total.scale_rate
        metrics["mismatch/d_act"] = total.d_act
        metrics["mismatch/nan_blocks"] = total.nan_blocks
        if rollout.guidance is not None and rollout.guidance.guides.keys() & sites.keys():
            guided = mismatch.of_layers(sites, rollout.audit.layers, rollout.guidance.layers)
            # Guidance gives back the rollout's code exactly where it lies in the trainer's bracket,
            # so what still differs at guided sites and layers was out of it.
            metrics["guidance/out_of_bracket_rate"] = guided.code_rate
        return metrics


def valid_inputs(rollout: Rollout) -> jax.Array:
    """Float32 [B, T]: 1 on tokens that the rollout computed, prompt included.

    The last token of a sequence was drawn but never fed back: it has no record.
    """
    position_T = jnp.arange(rollout.tokens_BT.shape[1])
    return (position_T < rollout.length_B[:, None] - 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Supervised training on worked answers, unquantized, to give RL something to improve."""

    cfg: ModelConfig
    dtype: jnp.dtype
    transformation: optax.GradientTransformation

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(
        self, state: TrainState, tokens_BT: jax.Array, mask_BT: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """The state after one update on tokens where mask_BT is 1, and the loss (nats a token)."""

        def loss(params):
            out = decoder.forward(params, tokens_BT, self.cfg, policy=NOTHING, dtype=self.dtype)
            logp_BT, _ = log_probs.next_token_log_probs(out.logits, tokens_BT, 1.0)
            total, tokens = losses.cross_entropy(logp_BT, mask_BT)
            return total / tokens

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = self.transformation.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, params=params, opt_state=opt_state), value
