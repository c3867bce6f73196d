"""One FP4 rollout, recorded in full, and training forwards over its tokens; no learning involved.

A rollout carries the full codes of every site and layer as its audit. An Arm says how a trainer
reads it; the two are compared token by token and site by site. What can be data is data (weights,
noise, routes), so that one compiled program serves every number of the same Arm.

Letters: B sequences, T tokens, L layers.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import Operand, to_compute
from trace_jax.guidance import mismatch, record
from trace_jax.guidance.mismatch import Mismatch
from trace_jax.guidance.policy import Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture, packing
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl import experience, gap
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout, Sampler
from trace_jax.training.step import Trainer, valid_inputs


def guided_patterns(settings: Settings) -> tuple[str, ...]:
    """The sites that guidance covers: every quantized one but experts/mid, which follows."""
    return tuple(site for site in settings.quantized.sites if site != "experts/mid")


def recording(settings: Settings, encoding: str, share: str = "all") -> Recording:
    """All guided sites in an encoding, in a share of the layers."""
    layers = architecture.site_layers(settings.cfg)
    return record.recording(encoding, guided_patterns(settings), share, layers, settings.quantized)


def sampler(settings: Settings, policy: Policy) -> Sampler:
    """The Sampler of training rollouts under a policy, recording the full codes of what is FP4."""
    full = recording(settings, "codes") if policy.sites else None
    return dataclasses.replace(
        settings.sampler(), policy=policy, recording=full, audit=None, check=None
    )


def sample(settings: Settings, task: Task, params: dict, policy: Policy, index: int = 0) -> Rollout:
    """Rollout number `index` at the configured temperature; its full codes are its audit."""
    packed = packing.pack_jit(params, policy, settings.dtype)
    drawn = experience.sample(
        settings, task, sampler(settings, policy), packed, index, jax.random.key(1)
    )
    return dataclasses.replace(drawn, audit=drawn.guidance, guidance=None)


def engine(settings: Settings, relative: float = 0.0, bfloat16: bool = False) -> EngineNoise:
    """An engine whose kernels, or BF16 activations, are the same in all layers; one value each."""
    layers = settings.cfg.num_layers
    return EngineNoise(
        jax.random.key(2), jnp.full(layers, relative, jnp.float32), jnp.full(layers, bfloat16)
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def weights(params: dict, policy: Policy, dtype: jnp.dtype, fp4: bool) -> dict:
    """Masters as a forward reads them, those that the policy quantizes as Operands, FP4 or not.

    Both have one structure, and so one compiled program of a forward.
    """

    def one(leaf, master):
        if not packing.is_packed(leaf):
            return leaf
        operand = block_scaled.operand(leaf, dtype)
        if fp4:
            return operand
        return Operand(to_compute(master, dtype), jax.tree.map(jnp.ones_like, operand.outer))

    packed = packing.pack(params, policy, dtype)
    return jax.tree.map(one, packed, params, is_leaf=packing.is_packed)


@dataclasses.dataclass(frozen=True)
class Arm:
    """How the trainer rounds. Static and hashable."""

    policy: Policy
    recording: Recording | None = None  # what it sees of the audit; None: it rounds by itself


class Comparison(NamedTuple):
    """A training forward against its rollout."""

    metrics: dict[str, jax.Array]  # scalars, under the names of metrics.jsonl
    log_ratio_BT: jax.Array  # log p of the trainer less that of the rollout, nats; 0 off completion
    sites: dict[str, Mismatch]  # [L, B] by site; empty without an audit

    def gap_B(self, mask_BT: np.ndarray) -> np.ndarray:
        """What each sequence brings to the mean gap (nats), float64, of a Comparison on the host.

        Its sum of |log_ratio| over the mean length of a completion: the mean over sequences is the
        mean over tokens, mismatch/logp_abs_mean.
        """
        return np.abs(self.log_ratio_BT).sum(axis=1, dtype=np.float64) / mask_BT.sum(axis=1).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def compare(
    trainer: Trainer,
    arm: Arm,
    params: dict,
    rollout: Rollout,
    noise: EngineNoise,
    replay_routes: jax.Array | bool,
) -> Comparison:
    """The Comparison of one arm. Of the trainer, what the arguments do not say is kept.

    params: masters, or as of `weights`.
    """
    audit = rollout.audit and Recording("codes", rollout.audit.layers)
    reader = dataclasses.replace(trainer, policy=arm.policy, replay_routes=True, audit=audit)
    guidance = arm.recording and record.reduce(rollout.audit, arm.recording)
    given = dataclasses.replace(rollout, guidance=guidance)
    routes = jax.tree.map(
        lambda routes_LBTA: jnp.where(replay_routes, routes_LBTA.astype(jnp.int32), -1),
        rollout.routes_LBTA,
    )
    out = reader.forward(params, dataclasses.replace(given, routes_LBTA=routes), noise)
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, trainer.temperature)
    metrics = gap.gap_metrics(logp_BT, rollout.logp_BT, rollout.mask_BT)
    metrics |= reader.mismatch_metrics(out, given)
    sites = {}
    if out.recorded:
        sites = mismatch.compare_sequences(out.recorded[0], rollout.audit, valid_inputs(rollout))
    log_ratio_BT = gap.log_ratio(logp_BT, rollout.logp_BT, rollout.mask_BT)
    return Comparison(metrics, log_ratio_BT, sites)
