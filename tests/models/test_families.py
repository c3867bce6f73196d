"""Every family, tiny: decode equals training forward, self-replay, gradients, two GRPO updates.

One model for each way that layers are built: the hybrids (gated attention, DeltaNet, shared
expert), Flash-Next (hyper-connections, sparse attention, n-grams) and dense. Qwen3-MoE is the model
of the other tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.small_model import UNOPTIMIZED, quick_forward
from trace_jax.guidance import mismatch, policy, record
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import architecture, config, decoder, packing
from trace_jax.rl.objective import Objective
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Sampler
from trace_jax.training import state as train_state
from trace_jax.training.step import TrainBatch, Trainer, valid_inputs

FLOAT32 = jnp.dtype("float32")


def smaller(name):
    """The tiny version, at values that spread and a vocabulary of 64."""
    tiny = config.tiny(config.get(name))
    changes = {"vocab_size": 64, "initializer_range": 0.2, "num_experts": 4}
    if tiny.ngram:
        changes["ngram"] = dataclasses.replace(tiny.ngram, eos_id=5)
    return dataclasses.replace(tiny, **changes)


MODELS = {
    "hybrid": smaller("qwen3_5_35b_a3b"),
    "flash_next": smaller("qwen3_8_flash_next"),
    "dense": dataclasses.replace(
        smaller("qwen3_30b_a3b"), num_layers=2, num_experts=0, num_experts_per_token=0,
        moe_intermediate_size=0, intermediate_size=64, tie_embeddings=True, qk_norm=False,
    ),
}  # fmt: skip
B, P, N = 4, 6, 12
LENGTH_B = np.array([6, 3, 1, 5], np.int32)
each_family = pytest.mark.parametrize("name", MODELS)


@functools.cache
def masters(name):
    return jax.jit(decoder.init, static_argnums=0)(MODELS[name], jax.random.key(1))


def everything(name):
    """All sites in FP4, those that must be named one by one too (not the recurrent state)."""
    cfg = MODELS[name]
    found = architecture.sites(cfg)
    rules = [(site, "nvfp4") for site in ("head/in", "*") if site == "*" or site in found]
    return policy.resolve(rules, found)


def recording(name, encoding):
    found = architecture.site_layers(MODELS[name])
    quantized = everything(name)
    return record.recording(encoding, quantized.sites, "all", found, quantized)


@functools.cache
def rollout(name, quantized=True, encoding="codes"):
    """Right-padded prompts of several lengths, sampled to the end of the cache."""
    used = everything(name) if quantized else NOTHING
    kept = recording(name, encoding) if quantized else None
    sampler = Sampler(MODELS[name], used, FLOAT32, N, (), 0, recording=kept)
    packed = packing.pack_jit(masters(name), used, FLOAT32)
    prompts = np.random.default_rng(0).integers(1, 64, (B, P))
    prompts = np.where(np.arange(P) < LENGTH_B[:, None], prompts, 0).astype(np.int32)
    arguments = (packed, prompts, LENGTH_B, jax.random.key(2), np.arange(B), 1.0)
    return Sampler.__call__.lower(sampler, *arguments).compile(UNOPTIMIZED)(*arguments)


@each_family
def test_decode_is_the_training_forward(name):
    """Unquantized: log-probs sampled through cache and state are those of a whole sequence."""
    sampled = rollout(name, quantized=False)
    out = quick_forward(masters(name), sampled.tokens_BT, MODELS[name])
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, sampled.tokens_BT, 1.0)
    mask_BT = sampled.mask_BT.astype(bool)
    np.testing.assert_allclose(logp_BT[mask_BT], sampled.logp_BT[mask_BT], atol=2e-5)
    assert np.std(sampled.logp_BT[mask_BT]) > 0.3


@each_family
def test_guided_training_forward_takes_the_codes_of_decode(name):
    """Quantized at every site: the forward that follows the record agrees in codes and log-probs.

    Chunked and recurrent DeltaNet, prefill and one token at a time: all give the recorded codes.
    """
    sampled = rollout(name)
    out = guided(name, sampled)
    found = mismatch.compare(out.recorded[0], sampled.guidance, valid_inputs(sampled))
    assert set(found) == set(everything(name).sites)
    for site, of in found.items():
        assert not np.any(of.codes), site
        assert not np.any(of.scales), site
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, sampled.tokens_BT, 1.0)
    mask_BT = sampled.mask_BT.astype(bool)
    np.testing.assert_allclose(logp_BT[mask_BT], sampled.logp_BT[mask_BT], atol=2e-4)


def guided(name, sampled):
    return quick_forward(
        masters(name), sampled.tokens_BT, MODELS[name], policy=everything(name), dtype=FLOAT32,
        guidance=sampled.guidance, routes_LBTA=sampled.routes_LBTA,
        records=(recording(name, "codes"),),
    )  # fmt: skip


@each_family
def test_self_replay_changes_nothing(name):
    """The trainer's own record, at every site, in each encoding."""
    tokens_BT = rollout(name).tokens_BT
    run = functools.partial(quick_forward, masters(name), tokens_BT, MODELS[name], dtype=FLOAT32)
    records = tuple(recording(name, encoding) for encoding in ("codes", "low1"))
    own = run(policy=everything(name), records=records)
    for guidance in own.recorded:
        again = run(
            policy=everything(name), records=records, guidance=guidance, routes_LBTA=own.routes_LBTA
        )
        assert np.array_equal(again.logits, own.logits)
        assert jax.tree.all(jax.tree.map(np.array_equal, again.recorded, own.recorded))


@each_family
def test_two_updates_under_trace(name):
    """Low bits recorded by the sampler guide the step; every parameter gets a gradient."""
    cfg, quantized = MODELS[name], everything(name)
    audit = recording(name, "codes")
    audit = dataclasses.replace(
        audit, layers=tuple(kept for kept in audit.layers if kept[0] != "experts/mid"), sequences=2
    )
    trainer = Trainer(
        cfg, quantized, jnp.dtype("bfloat16"), optax.adam(1e-3), 1.0, replay_routes=True,
        objective=Objective(), audit=audit,
    )  # fmt: skip
    sampler = Sampler(
        cfg, quantized, jnp.dtype("bfloat16"), N, (), 0,
        recording=recording(name, "low1"), audit=audit,
    )  # fmt: skip
    state = train_state.create(jax.tree.map(jnp.copy, masters(name)), trainer.transformation)
    sample = update = None
    for step in range(2):
        packed = packing.pack_jit(state.params, quantized, jnp.dtype("bfloat16"))
        prompts = np.random.default_rng(step).integers(1, 64, (B, P)).astype(np.int32)
        arguments = (packed, prompts, LENGTH_B, jax.random.key(step), np.arange(B), 1.0)
        sample = sample or Sampler.__call__.lower(sampler, *arguments).compile(UNOPTIMIZED)
        batch = TrainBatch(
            sample(*arguments), jnp.array([1.0, -1, 1, -1]), jnp.ones(B), jax.random.key(0)
        )
        update = update or Trainer.update.lower(trainer, state, batch).compile(UNOPTIMIZED)
        before = jax.tree.map(np.array, state.params)
        state, metrics = update(state, batch)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert metrics["mismatch/code_rate"] < 1e-3
        assert metrics["mismatch/logp_abs_mean"] < 5e-3
    moved = jax.tree_util.tree_map_with_path(
        lambda path, a, b: (jax.tree_util.keystr(path), bool(np.any(a != b))), before, state.params
    )
    still = [
        n for n, any_ in jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, tuple)) if not any_
    ]
    assert all("indexer" in n for n in still), still  # the selection has no gradient
