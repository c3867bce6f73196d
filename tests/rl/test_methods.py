"""The table of methods: what each row quantizes, and one rollout and update of each neighbour.

The paper's own methods are run from end to end in test_run.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import tiny_run
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import decoder, packing
from trace_jax.rl import methods
from trace_jax.rl.settings import resolve
from trace_jax.training import state as train_state
from trace_jax.training.step import TrainBatch

PAPERS = {"bf16", "fp4_rollout", "qat", "trace", "trace_full", "trace_syndrome"}
NEIGHBOURS = {  # method -> its own metrics
    "quads": set(),
    "qarl": {"policy/correction_ratio", "policy/masked_share"},
    "tis": {"policy/correction_ratio", "policy/truncated_share"},
    "icepop": {"policy/correction_ratio", "policy/masked_share"},
    "score_centering": {"policy/correction_ratio"},
}
OWN = set.union(*NEIGHBOURS.values())


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with tiny_run.quick_compiles(tiny_run.compiled_programs(tmp_path_factory)):
        yield


def settings_of(method, **overrides):
    return resolve(tiny_run.config({"method": method} | overrides))


@functools.cache
def params():
    return jax.jit(decoder.init, static_argnums=0)(settings_of("qat").cfg, jax.random.key(0))


@functools.cache
def sampled(sampler, policy):
    """A rollout of random prompts by a sampler: methods that share one share its program."""
    prompts = np.random.default_rng(0).integers(48, 58, (16, 3)).astype(np.int32)
    packed = packing.pack_jit(params(), policy, sampler.dtype)
    length = np.full(16, 3, np.int32)
    return sampler(packed, prompts, length, jax.random.key(0), np.arange(16), 1.0)


def test_the_table_of_methods_is_covered():
    assert methods.METHODS.keys() == PAPERS | NEIGHBOURS.keys()


def test_an_unknown_method_raises():
    with pytest.raises(ValueError, match=r"method='grpo' is unknown: choose one of \['bf16'"):
        methods.get("grpo")


@pytest.mark.parametrize("method", NEIGHBOURS)
def test_a_step_of_each_neighbour(method):
    """A rollout and an update under its own policies and objective; every number is finite."""
    settings = settings_of(method)
    trainer = settings.trainer()
    rollout = sampled(settings.sampler(), settings.rollout_policy)
    advantage_B = np.tile(np.array([1, -1], np.float32), 8)
    batch = TrainBatch(rollout, advantage_B, np.ones(16, np.float32), jax.random.key(1))
    state = train_state.create(jax.tree.map(np.copy, params()), trainer.transformation)
    state, metrics = trainer.update(state, batch)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert metrics["train/grad_norm"] > 0
    assert metrics["mismatch/logp_abs_mean"] > 0
    corrected = NEIGHBOURS[method]  # then the ratio is to the trainer itself
    assert metrics["policy/importance_ratio"] == pytest.approx(1, abs=1e-6 if corrected else 0.1)
    assert metrics.keys() & OWN == NEIGHBOURS[method]
    if corrected:
        assert 0 < abs(metrics["policy/correction_ratio"] - 1) < 0.5
    for name in metrics.keys() & {"policy/masked_share", "policy/truncated_share"}:
        assert 0 <= metrics[name] <= 1


def test_what_each_side_quantizes():
    for method in ("tis", "icepop", "score_centering"):
        settings = settings_of(method)
        assert settings.rollout_policy == settings.quantized
        assert settings.training_policy.formats == settings.training_policy.weights == ()
    settings = settings_of("quads")
    assert settings.rollout_policy == settings.quantized
    assert settings.quantized.residual == 0.5
    assert settings.training_policy.weights == settings.quantized.weights
    assert settings.training_policy.formats == ()
    assert not any(settings_of(m).quantized.residual for m in methods.METHODS if m != "quads")
    settings = settings_of("qarl")
    assert settings.rollout_policy == settings.training_policy == settings.quantized
    assert settings_of("bf16").rollout_policy == NOTHING


def test_quads_trains_on_the_rollouts_weights_and_on_no_rounded_activation():
    """Its forward is the plain one of the dequantized weights."""
    settings = settings_of("quads")
    packed = packing.pack(params(), settings.rollout_policy, jnp.float32)
    tokens_BT = np.random.default_rng(0).integers(48, 58, (2, 5)).astype(np.int32)
    run = functools.partial(decoder.forward, cfg=settings.cfg, dtype=jnp.dtype("float32"))
    ours = jax.jit(functools.partial(run, policy=settings.training_policy))(params(), tokens_BT)
    plain = jax.jit(run)(packing.masters(packed), tokens_BT)
    np.testing.assert_allclose(ours.logits, plain.logits, atol=1e-4)
    bf16 = jax.jit(run)(params(), tokens_BT)
    assert np.abs(bf16.logits - plain.logits).max() > 0.01


def test_a_method_takes_its_own_loss_and_correction_unless_the_config_names_others():
    named = {
        name: (settings.objective.loss, settings.objective.correction, settings.old_log_probs)
        for name in methods.METHODS
        for settings in [settings_of(name)]
    }
    assert named.pop("qarl") == ("tbpo", "trust_band", "trainer")
    for name in ("tis", "icepop", "score_centering"):
        assert named.pop(name) == ("grpo", name, "trainer")
    assert set(named.values()) == {("grpo", "none", "rollout")}
    settings = settings_of("trace", **{"rl.loss": "gspo", "rl.correction": "sequence_mask"})
    assert (settings.objective.loss, settings.objective.correction) == ("gspo", "sequence_mask")
    assert settings.old_log_probs == "trainer"
    plain = settings_of("tis", **{"rl.correction": "none"})
    assert plain.objective == settings_of("fp4_rollout").objective
    assert plain.old_log_probs == "rollout"
    bounded = settings_of("tis", **{"rl.tis_cap": 5.0, "rl.clip_low": 0.1}).objective.bounds
    assert (bounded.tis_cap, bounded.clip_low) == (5.0, 0.1)


def test_heads_are_recorded_for_score_centering_only():
    heads = {name: settings_of(name).sampler().head_tokens for name in methods.METHODS}
    assert heads == dict.fromkeys(methods.METHODS, 0) | {"score_centering": 64}
    assert not settings_of("score_centering").evaluator(NOTHING).head_tokens
    assert dataclasses.replace(settings_of("score_centering").sampler(), head_tokens=0) == (
        settings_of("fp4_rollout").sampler()
    )
