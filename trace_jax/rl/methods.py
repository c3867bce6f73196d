"""The methods, as data: what each side quantizes, and what the rollout tells the trainer.

They run the same code; a method is one row of this table.

    bf16          BF16 rollout, BF16 training: the reference
    fp4_rollout   FP4 rollout, BF16 training: fast, and off-policy by the whole quantization error
    qat           FP4 on both sides, each rounding to nearest: plain quantization-aware training
    trace         FP4 on both sides, training guided by the low bit of the rollout's codes, latter
                  half of the layers, routes replayed: the paper's R-1bit configuration
    trace_syndrome  the same guidance of all layers from parity checks, at a quarter of a bit a
                  value, scales included (guidance/syndrome.py)
    trace_full    the same with full codes in all layers: the paper's upper bound
Source: TRACE (arXiv 2610.07767) sections 3.1, 3.2 and its baselines.

Its neighbours meet the same gap elsewhere. In what each side computes:

    quads            FP4 weights on both sides. Training: activations, K and V in BF16. Rollout: in
                     FP4, x ~ Q(x) + Q(r), r = x - Q(x) on half of the channels, as a second product
                     (quantizer.residual); K and V get none (arXiv 2607.15810)

In the loss (rl/objective.py), with k = pi_old / pi_rollout:

    qarl             as qat, with TBPO: J = mean_i [s_i in band] [w_i in band] w_i s_i A_i, the
                     geometric means over a sequence of pi / pi_old and of k (arXiv 2604.07853)
    tis              as fp4_rollout, each token weighed by min(k, 2) (FlashRL)
    icepop           as fp4_rollout, each token weighed by k within [0.5, 5], by 0 outside (Ant)
    score_centering  as fp4_rollout, the gap's mean score subtracted (arXiv 2609.20807)
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Method:
    """One way of training with quantized rollouts."""

    rollout_fp4: bool
    training_fp4: bool
    encoding: str | None = None  # of the guidance (guidance/quantizer.py), None: no guidance
    layers: str = "all"  # share of the layers guided (guidance/record.py)
    replay_routes: bool = False
    training_activations: bool = True  # whether FP4 training quantizes them, or weights alone
    residual: float = 0.0  # share of the rollout's channels with a residual (guidance/policy.py)
    loss: str = "grpo"  # of rl/objective.py, as the correction
    correction: str = "none"


METHODS = {
    "bf16": Method(rollout_fp4=False, training_fp4=False),
    "fp4_rollout": Method(rollout_fp4=True, training_fp4=False),
    "qat": Method(rollout_fp4=True, training_fp4=True),
    "trace": Method(True, True, encoding="low1", layers="latter_half", replay_routes=True),
    "trace_syndrome": Method(True, True, encoding="syndrome", layers="all", replay_routes=True),
    "trace_full": Method(True, True, encoding="codes", layers="all", replay_routes=True),
    "quads": Method(True, True, training_activations=False, residual=0.5),
    "qarl": Method(True, True, loss="tbpo", correction="trust_band"),
    "tis": Method(True, False, correction="tis"),
    "icepop": Method(True, False, correction="icepop"),
    "score_centering": Method(True, False, correction="score_centering"),
}


def get(name: str) -> Method:
    """The named method. Raises ValueError listing the choices."""
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown: choose one of {sorted(METHODS)}")
    return METHODS[name]
