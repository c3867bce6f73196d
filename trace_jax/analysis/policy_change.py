"""How much of a policy's change a log-ratio shows, and how much of it is rounding; one rollout.

Weights are moved on: by updates on the rollout itself, by updates on other rollouts (staleness), or
by noise that means nothing. The rollout's tokens are then scored with the weights as they were and
as they are, under every View: the trainer's forwards, guided and not, the FP4 policy that would be
deployed, and unquantized ones. A View's change is its new log-prob minus its old, in nats.

FP4 is not smooth: a weight that moves by nothing lands activations on other codes. What an FP4
change means is therefore told by its mean over copies of the weights that are perturbed by far less
than an update (dithering), in two halves with draws of their own: noise that the halves do not
share drops out of their covariance. Letters: B sequences, T tokens, N completion tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trace_jax.analysis import change_statistics as stats
from trace_jax.analysis import comparison
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture
from trace_jax.rl import experience
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout
from trace_jax.training import state as train_state
from trace_jax.training.state import TrainState
from trace_jax.training.step import TrainBatch, Trainer

LEARNING_RATES = (1e-4, 3e-4, 1e-3)
UPDATES = (1, 2, 4, 8)  # on the rollout that is scored
STALENESS = (1, 2, 3)  # updates on other rollouts
NOISE = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the weights, relative to their rms
NOISE_DRAWS = 3
DITHER = 1e-3  # of the weights, relative to their rms
COPIES = 8  # of the weights, dithered; half of them in each half

FP4, FP4_MEAN, BF16, FLOAT32 = "FP4 policy", "FP4 policy, mean", "BF16", "float32"
UNGUIDED, UNGUIDED_REPLAY = "unguided", "unguided, routes replayed"
LOW_BIT, LATTER_HALF, CODES = "low bit, all layers", "low bit, latter half", "full codes"

TRAINED = {  # name -> the views of the first update on a rollout and of those after it
    "qat": (UNGUIDED, UNGUIDED),
    LOW_BIT: (LOW_BIT, LOW_BIT),
    LATTER_HALF: (LATTER_HALF, LATTER_HALF),
    CODES: (CODES, CODES),
    "low bit, first update only": (LOW_BIT, UNGUIDED_REPLAY),
}


# -- views -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class View:
    """One way to score a rollout: a forward, and what of the record it follows."""

    trainer: Trainer
    recording: Recording | None = None

    def given(self, rollout: Rollout) -> Rollout:
        """The rollout, with full codes as its audit, as this view would have found it recorded."""
        guidance = self.recording and record.reduce(rollout.audit, self.recording)
        return dataclasses.replace(rollout, guidance=guidance, audit=None)


def views(settings: Settings) -> dict[str, View]:
    """The views by name; the trainer's with the configured engine noise, the others without."""
    # The learning rate is part of the state, so that all rates share one compiled update.
    adam = optax.inject_hyperparams(train_state.clipped_adam, static_args="max_grad_norm")(
        learning_rate=0.0, max_grad_norm=settings.rl.max_grad_norm
    )
    base = dataclasses.replace(
        settings.trainer(),
        audit=None,
        policy=settings.quantized,
        transformation=adam,
        old_log_probs="rollout",
    )
    layers = architecture.site_layers(settings.cfg)
    sites = comparison.guided_patterns(settings)

    def view(encoding=None, share="all", **changed):
        recording = encoding and record.recording(
            encoding, sites, share, layers, settings.quantized
        )
        return View(dataclasses.replace(base, **changed), recording)

    quiet = dict(engine_noise=0.0, replay_routes=False)
    return {
        LOW_BIT: view("low1", replay_routes=True),
        LATTER_HALF: view("low1", "latter_half", replay_routes=True),
        CODES: view("codes", replay_routes=True),
        UNGUIDED: view(replay_routes=False),
        UNGUIDED_REPLAY: view(replay_routes=True),
        FP4: view(**quiet),
        BF16: view(policy=NOTHING, **quiet),
        FLOAT32: view(policy=NOTHING, dtype=jnp.dtype("float32"), **quiet),
    }


@functools.partial(jax.jit, static_argnums=0)
def score(trainer: Trainer, params: dict, rollout: Rollout, noise_key: jax.Array) -> jax.Array:
    """Log-probs (nats) of the rollout's tokens under a training forward, float32 [B, T]."""
    out = trainer.forward(params, rollout, trainer.noise(noise_key))
    return log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, trainer.temperature)[0]


@jax.jit
def perturbed(params: dict, key: jax.Array, size: float) -> dict:
    """Parameters plus Gaussian noise of `size` times the rms of each leaf."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    rms = [jnp.sqrt(jnp.mean(leaf**2)) for leaf in leaves]
    noise = [r * jax.random.normal(k, x.shape) for k, r, x in zip(keys, rms, leaves, strict=True)]
    return jax.tree.unflatten(tree, [x + size * n for x, n in zip(leaves, noise, strict=True)])


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores one rollout under all views, from weights as they come."""

    views: dict[str, View]
    rollout: Rollout
    noise_key: jax.Array

    def tokens(self, logp_BT: jax.Array) -> np.ndarray:
        """The values of the completion tokens, float64 [N]."""
        return np.asarray(logp_BT, float)[np.asarray(self.rollout.mask_BT) > 0]

    def plain(self, params: dict) -> dict[str, np.ndarray]:
        """Log-probs [N] by view."""
        scored = {
            name: score(view.trainer, params, view.given(self.rollout), self.noise_key)
            for name, view in self.views.items()
        }
        return {name: self.tokens(logp_BT) for name, logp_BT in scored.items()}

    def halves(self, params: dict) -> np.ndarray:
        """The FP4 policy's mean log-prob over each half of the dithered copies, [2, N]."""
        view = self.views[FP4]
        copies = [
            self.tokens(score(view.trainer, copy, view.given(self.rollout), self.noise_key))
            for key in jax.random.split(jax.random.key(3), COPIES)
            for copy in [perturbed(params, key, DITHER)]
        ]
        return np.reshape(copies, (2, COPIES // 2, -1)).mean(axis=1)


# -- what moves the weights ------------------------------------------------------------------------


def sampled(settings: Settings, task: Task, params: dict, index: int) -> TrainBatch:
    """FP4 rollout number `index` with its advantages, every code recorded as its audit."""
    rollout = comparison.sample(settings, task, params, settings.quantized, index)
    noise_key = jax.random.fold_in(jax.random.key(2), index)
    return experience.score(settings, task, rollout, index, noise_key).batch


def fresh_state(view: View, params: dict, rate: float) -> TrainState:
    """A state at a learning rate, Adam's statistics at zero; holds copies, for updates donate."""
    state = train_state.create(jax.tree.map(jnp.copy, params), view.trainer.transformation)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
    return state


def updates_on(batch: TrainBatch, seen_as: list[View], params: dict, rate: float) -> Iterator[dict]:
    """Parameters after each of a row of updates on one batch, each under its view."""
    state = fresh_state(seen_as[0], params, rate)
    for view in seen_as:
        given = dataclasses.replace(batch, rollout=view.given(batch.rollout))
        state, _ = view.trainer.update(state, given)
        yield jax.tree.map(jnp.copy, state.params)


def updates_on_others(
    settings: Settings, task: Task, view: View, params: dict, rate: float, count: int
) -> Iterator[dict]:
    """Parameters after each of `count` updates of the usual loop, each on a rollout of its own."""
    state = fresh_state(view, params, rate)
    for index in range(1, count + 1):
        batch = sampled(settings, task, state.params, index)
        given = dataclasses.replace(batch, rollout=view.given(batch.rollout))
        state, _ = view.trainer.update(state, given)
        yield jax.tree.map(jnp.copy, state.params)


def relative_change(new: dict, old: dict) -> float:
    """|new - old| / |old| over all parameters (Frobenius)."""
    norm = lambda tree: float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))))
    return norm(jax.tree.map(jnp.subtract, new, old)) / norm(old)


# -- measuring -------------------------------------------------------------------------------------


def measure(settings: Settings, task: Task, params: dict) -> list[dict]:
    """All rows: one for each way of moving the weights, amount of it, and view."""
    seen = views(settings)
    batch = sampled(settings, task, params, 0)
    rollout = batch.rollout
    scorer = Scorer(seen, rollout, batch.noise_key)
    old, old_halves = scorer.plain(params), scorer.halves(params)
    logp_N, rows = scorer.tokens(rollout.logp_BT), []

    def add(moved, **said):
        new, halves = scorer.plain(moved), scorer.halves(moved) - old_halves
        said |= {"seed": settings.seed, "weight_change": relative_change(moved, params)}
        rows.extend(said | row for row in compare(settings, new, old, halves, logp_N))

    for size in NOISE:
        for draw in range(NOISE_DRAWS):
            key = jax.random.fold_in(jax.random.key(4), draw)
            add(perturbed(params, key, size), moved_by="noise", trained="", amount=size, draw=draw)
    for rate in LEARNING_RATES:
        for name, (first, later) in TRAINED.items():
            said = dict(trained=name, learning_rate=rate)
            if 0 in UPDATES:
                add(params, moved_by="updates", amount=0, **said)
            seen_as = [seen[first]] + [seen[later]] * (max(UPDATES) - 1)
            for i, moved in enumerate(updates_on(batch, seen_as, params, rate), 1):
                if i in UPDATES:
                    add(moved, moved_by="updates", amount=i, **said)
            if first != later:
                continue  # one update a rollout: the same as guided always
            others = updates_on_others(settings, task, seen[first], params, rate, max(STALENESS))
            for i, moved in enumerate(others, 1):
                if i in STALENESS:
                    add(moved, moved_by="staleness", amount=i, **said)
    return rows


def compare(
    settings: Settings, new: dict, old: dict, halves_2N: np.ndarray, rollout_N: np.ndarray
) -> list[dict]:
    """A row a view, from log-probs [N] by view and the FP4 policy's mean change in two halves.

    view          its name
    mean, abs_mean, outside          of its change: nats, nats, share beyond the clip range
    outside_rollout                  the same share for new log-prob minus the rollout's
    fp4_*, mean_*, bf16_*            slope and correlation against the FP4 policy's change, its mean
                                     (free of the halves' noise), and the BF16 change
    """
    change = {name: new[name] - old[name] for name in new} | {FP4_MEAN: halves_2N.mean(axis=0)}
    clip = (settings.rl.clip_low, settings.rl.clip_high)
    rows = []
    for name, change_N in change.items():
        row = {
            "view": name,
            "mean": float(change_N.mean()),
            "abs_mean": float(np.abs(change_N).mean()),
            "outside": stats.outside(change_N, *clip),
            "mean_slope": stats.slope_on_mean(change_N, *halves_2N),
            "mean_correlation": stats.correlation_with_mean(change_N, *halves_2N),
        }
        if name in new:
            row["outside_rollout"] = stats.outside(new[name] - rollout_N, *clip)
        for key, truth in (("fp4", FP4), ("bf16", BF16)):
            row[f"{key}_slope"] = stats.slope(change_N, change[truth])
            row[f"{key}_correlation"] = stats.correlation(change_N, change[truth])
        rows.append(row)
    return rows
