"""Where the gap between a rollout and its trainer comes from: shares of sources that add up to it.

A source is one thing in which a trainer may differ from the FP4 rollout whose tokens it scores:

    weights     masters as they are instead of their FP4 values
    activations inputs of the linear layers as they are instead of FP4
    kv cache    K, V and recurrent state as they are instead of FP4
    scales      its own block scales instead of the recorded ones
    codes       its own rounding instead of the recorded low bits
    routing     its own experts instead of the replayed ones
    kernels     another engine's (models/layer_context.py)
    staleness   parameters some updates on
    truncation  the whole softmax, where the rollout drew from a truncated one

With none of them the trainer is the rollout, up to what one machine's two programs differ by. Which
source is to blame for what several do together is settled by Shapley values (analysis/shapley.py):
v(S) is the mean |log-prob gap| of a token, or the mean D_act of a sequence, with the sources S on.
Two trainers are played. BF16 on an FP4 rollout: what it has not left unquantized it rounds by
itself, as QAT does. And QAT itself: without scales and codes of its own it is TRACE.

Letters: B sequences, T tokens, L layers, S coalitions, N sources, Q prompts.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from trace_jax.analysis import comparison, shapley
from trace_jax.analysis.comparison import Arm, Comparison
from trace_jax.guidance.policy import STATE
from trace_jax.models import packing
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl import experience
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout.sampler import Rollout
from trace_jax.training import state as train_state
from trace_jax.training.step import Trainer

STALENESS = 2  # updates of the stale trainer where rl.staleness is 0
CACHE = ("attention/k", "attention/v", STATE)
ENCODING = {  # (own scales, own codes) -> the record that is left to follow
    (False, False): "low1",
    (True, False): "bits",
    (False, True): "scales",
    (True, True): None,
}
Sources = frozenset[str]
ROUNDING = frozenset(("scales", "codes"))


@dataclasses.dataclass(frozen=True)
class Game:
    """A trainer and the sources that share its gap; `given` ones are on in every coalition."""

    trainer: str
    sources: tuple[str, ...]
    given: Sources = frozenset()

    @property
    def coalitions(self) -> list[Sources]:
        """What is on in each coalition, in the order of shapley.py."""
        return [on | self.given for on in shapley.coalitions(self.sources)]


def games(settings: Settings) -> tuple[Game, ...]:
    """The two games of a configuration, with the sources that it has."""
    quantized = settings.quantized
    sites = {site for site, _ in quantized.formats}
    rounding = {
        "weights": bool(quantized.weights),
        "activations": bool(sites - set(CACHE)),
        "kv cache": bool(sites & set(CACHE)),
    }
    common = {
        "routing": bool(settings.cfg.num_experts),
        "kernels": True,
        "staleness": True,
        "truncation": settings.sampler().truncates,
    }
    there = lambda sources: tuple(source for source, has in sources.items() if has)
    return (
        Game("BF16", there(rounding) + there(common), ROUNDING),
        Game("QAT", ("scales", "codes", *there(common))),
    )


def arm(settings: Settings, on: Sources) -> Arm:
    """How the trainer rounds with these sources on."""
    unquantized = lambda site: ("kv cache" if site in CACHE else "activations") in on
    sites = [site for site, _ in settings.quantized.formats if not unquantized(site)]
    encoding = ENCODING["scales" in on, "codes" in on]
    return Arm(
        settings.quantized.only(weights=True, sites=sites),
        encoding and comparison.recording(settings, encoding),
    )


class Bench(NamedTuple):
    """One rollout, and all that a trainer may read it with."""

    settings: Settings
    trainer: Trainer
    rollout: Rollout
    weights: dict[tuple[bool, bool], dict]  # (stale, FP4) -> as of comparison.weights
    engine: EngineNoise  # of the other engine, one value a layer

    def compare(self, on: Sources, noise: EngineNoise | None = None) -> Comparison:
        """The Comparison, on the host, of a trainer with these sources on.

        noise: takes the place of the other engine, whether "kernels" is on or not.
        """
        if noise is None:
            noise = quieted(self.engine, jnp.full(self.layers, "kernels" in on))
        params = self.weights["staleness" in on, "weights" not in on]
        rounding, replay = arm(self.settings, on), "routing" not in on
        seen = jax.device_get(
            comparison.compare(self.trainer, rounding, params, self.rollout, noise, replay)
        )
        log_mass_BT = self.rollout.log_mass_BT
        if log_mass_BT is None or "truncation" in on:
            return seen
        return seen._replace(log_ratio_BT=seen.log_ratio_BT - np.asarray(log_mass_BT))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.settings.cfg.num_layers


def engine(settings: Settings) -> tuple[str, EngineNoise]:
    """The other engine and its name: emulated noise as configured, else BF16 activations."""
    relative = settings.engine_noise
    noise = comparison.engine(settings, relative, relative == 0)
    return (f"emulated: {relative:.1%} noise" if relative else "measured: BF16 activations"), noise


def quieted(noise: EngineNoise, layers_L: jax.Array) -> EngineNoise:
    """The noise where layers_L is true; elsewhere the rollout's own engine."""
    return noise._replace(
        relative=noise.relative * layers_L, bfloat16=noise.bfloat16 & (layers_L > 0)
    )


def updates(settings: Settings) -> int:
    """By how many updates the stale trainer is ahead of its rollout."""
    return settings.rl.staleness or STALENESS


def updated(settings: Settings, task: Task, params: dict, count: int) -> dict:
    """Masters after `count` guided updates, each on a rollout of its own by the policy it finds."""
    sampler = comparison.sampler(settings, settings.quantized)
    trainer = dataclasses.replace(
        settings.trainer(), policy=settings.quantized, replay_routes=True, audit=None
    )
    state = train_state.create(jax.tree.map(jnp.copy, params), trainer.transformation)
    for version in range(count):
        packed = packing.pack_jit(state.params, settings.quantized, settings.dtype)
        rollout = experience.sample(
            settings, task, sampler, packed, 1 + version, jax.random.key(1), version
        )
        noise_key = jax.random.fold_in(jax.random.key(3), version)
        scored = experience.score(settings, task, rollout, 1 + version, noise_key)
        state, _ = trainer.update(state, scored.batch)
    return state.params


def bench(settings: Settings, task: Task, params: dict) -> Bench:
    """The rollout of params, and what reads it."""
    rollout = comparison.sample(settings, task, params, settings.quantized)
    later = updated(settings, task, params, updates(settings))
    weights = {
        (stale, fp4): comparison.weights(masters, settings.quantized, settings.dtype, fp4)
        for stale, masters in ((False, params), (True, later))
        for fp4 in (False, True)
    }
    return Bench(settings, settings.trainer(), rollout, weights, engine(settings)[1])


def attribute(bench: Bench, progress: bool = True) -> list[dict]:
    """The rows of both games; a coalition of both is measured once."""
    played = games(bench.settings)
    needed = {on for game in played for on in game.coalitions}
    bar = tqdm.tqdm(sorted(needed, key=sorted), desc="coalitions", disable=not progress)
    measured = {on: bench.compare(on) for on in bar}
    mask_BT, completions = np.asarray(bench.rollout.mask_BT), bench.settings.rollout.completions
    values = {
        "gap": {
            on: prompt_means(seen.gap_B(mask_BT), completions) for on, seen in measured.items()
        },
        "d_act": {on: prompt_means(d_act_B(seen), completions) for on, seen in measured.items()},
    }
    return [row for game in played for row in play(game, values)]


def play(game: Game, values: Mapping[str, Mapping[Sources, np.ndarray]]) -> list[dict]:
    """The rows of one game: its sources, then what is there with none and with all of them.

    values: by name of a quantity, what each coalition makes of it, [Q]. Each row has, by that name,
    the mean share and its 95% interval; a source also what it does alone, and last.
    """
    rows = [{"trainer": game.trainer, "source": source} for source in game.sources]
    rows += [{"trainer": game.trainer, "source": end} for end in ("none", "all")]
    for name, by_coalition in values.items():
        values_SQ = np.stack([by_coalition[on] for on in game.coalitions])
        draws_NQ = np.concatenate([shapley.shares(values_SQ), values_SQ[[0, -1]]])
        low_N, high_N = shapley.interval(draws_NQ)
        alone_N, last_N = (f(values_SQ).mean(axis=1) for f in (shapley.alone, shapley.last))
        for i, row in enumerate(rows):
            row[name] = {"share": draws_NQ[i].mean(), "low": low_N[i], "high": high_N[i]}
            if i < len(game.sources):
                row[name] |= {"alone": alone_N[i], "last": last_N[i]}
    return rows


def prompt_means(values_B: np.ndarray, completions: int) -> np.ndarray:
    """Means over the completions of a prompt, [Q]: they move together, prompts do not."""
    return values_B.reshape(-1, completions).mean(axis=1)


def d_act_B(seen: Comparison) -> np.ndarray:
    """D_act of each sequence, over all sites and layers."""
    total = lambda name: sum(getattr(m, name).sum(axis=0) for m in seen.sites.values())
    return np.sqrt(total("difference") / total("reference"))
