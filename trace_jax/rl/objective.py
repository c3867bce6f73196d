"""The objective: one loss (rl/losses.py) and one correction (rl/corrections.py), by name.

    loss = mean of -w surrogate(r, A) [+ A C]       r = pi / pi_old, w of k = pi_old / pi_rollout
Every pair goes together. Letters: B sequences, T tokens, H tokens of the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.rl import corrections, losses
from trace_jax.rl.gap import importance_ratio

LOSSES = ("grpo", "gspo", "tbpo")
CORRECTIONS = ("none", "tis", "icepop", "sequence_mask", "trust_band", "score_centering")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The constants of all losses and corrections, named as in `config.rl`."""

    clip_low: float = 0.2  # grpo: the ratio's clip range is [1 - low, 1 + high]
    clip_high: float = 0.28
    ratio_cap: float = 5.0
    gspo_clip_low: float = 3e-4  # the same, of a sequence's ratio
    gspo_clip_high: float = 4e-4
    tbpo_low: float = 0.8  # tbpo and trust_band: the least and largest ratio of a sequence
    tbpo_high: float = 1.28
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    sequence_mask_low: float = 0.5
    sequence_mask_high: float = 2.0


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss and a correction with their bounds. Static, hashable.

    Raises ValueError, listing the choices, for a name that is none.
    """

    loss: str = "grpo"
    correction: str = "none"
    bounds: Bounds = Bounds()

    def __post_init__(self):
        for key, choices in (("loss", LOSSES), ("correction", CORRECTIONS)):
            if getattr(self, key) not in choices:
                raise ValueError(
                    f"{key}={getattr(self, key)!r} is unknown: choose one of {sorted(choices)}"
                )

    @property
    def centres(self) -> bool:
        """Whether the heads of both distributions are wanted."""
        return self.correction == "score_centering"

    def __call__(
        self,
        logp_BT: jax.Array,
        logp_old_BT: jax.Array,
        logp_rollout_BT: jax.Array,
        advantage_B: jax.Array,
        mask_BT: jax.Array,
        heads: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(loss_sum, count, terms) as of the loss, with the correction's terms beside its own.

        These are policy/correction_ratio (k, before any truncation) and the share of tokens that
        were truncated or masked. heads: log-probs (nats) [B, T, H] of the rollout's head under
        trainer and rollout, where the objective `centres`. Only the trainer's get a gradient.
        """
        log_k_BT = corrections.rollout_ratio(logp_old_BT, logp_rollout_BT, mask_BT)
        weight_BT, terms_BT = self.weights(log_k_BT, mask_BT)
        if self.correction != "none":
            terms_BT["policy/correction_ratio"] = importance_ratio(log_k_BT)
        loss_sum, count, terms = self.surrogate(
            logp_BT, logp_old_BT, advantage_B, mask_BT, weight_BT
        )
        mean = losses.token_mean if self.loss == "grpo" else losses.sequence_mean
        share_BT = mean(mask_BT)
        if self.centres:
            centre_BT = corrections.score_centering(*heads, mask_BT)
            advantage_B1 = jax.lax.stop_gradient(advantage_B)[:, None]
            loss_sum = loss_sum + losses.total(advantage_B1 * centre_BT, share_BT)
        terms |= {name: losses.total(x_BT, share_BT) for name, x_BT in terms_BT.items()}
        return loss_sum, count, terms

    def weights(self, log_k_BT: jax.Array, mask_BT: jax.Array) -> corrections.Weights:
        """What each token weighs [B, T], and terms by token, for k = pi_old / pi_rollout."""
        b = self.bounds
        match self.correction:
            case "tis":
                return corrections.tis(log_k_BT, b.tis_cap)
            case "icepop":
                return corrections.icepop(log_k_BT, b.icepop_low, b.icepop_high)
            case "sequence_mask":
                return corrections.sequence_mask(
                    log_k_BT, mask_BT, b.sequence_mask_low, b.sequence_mask_high
                )
            case "trust_band":
                return corrections.trust_band(log_k_BT, mask_BT, b.tbpo_low, b.tbpo_high)
            case _:  # none, or nothing to weigh by
                return jnp.ones_like(log_k_BT), {}

    def surrogate(self, *arguments: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
        """(loss_sum, count, terms) of the loss; arguments as of `losses.grpo`."""
        b = self.bounds
        match self.loss:
            case "grpo":
                return losses.grpo(
                    *arguments,
                    clip_low=b.clip_low,
                    clip_high=b.clip_high,
                    ratio_cap=b.ratio_cap,
                )
            case "gspo":
                return losses.gspo(*arguments, clip_low=b.gspo_clip_low, clip_high=b.gspo_clip_high)
            case "tbpo":
                return losses.tbpo(*arguments, low=b.tbpo_low, high=b.tbpo_high)
