"""The training step against arithmetic by hand, over a rollout that was really sampled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.rl import tiny_run
from tests.small_model import CFG, EVERYTHING, SITE_LAYERS, masters, tokens
from trace_jax.formats import e2m1
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING
from trace_jax.guidance.record import Guidance
from trace_jax.models import decoder, packing
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl.objective import Objective
from trace_jax.rollout.sampler import Sampler
from trace_jax.training import state as train_state
from trace_jax.training.step import TrainBatch, Trainer, WarmUp, valid_inputs

BF16 = jnp.dtype("bfloat16")
SITES = ("attention/*", "experts/in")
LOW1 = record.recording("low1", SITES, "all", SITE_LAYERS, EVERYTHING)
AUDIT = dataclasses.replace(
    record.recording("codes", SITES, "all", SITE_LAYERS, EVERYTHING), sequences=6
)
CHECK = record.checking(LOW1)
SAMPLER = Sampler(
    CFG, EVERYTHING, BF16, 6, (3,), 0, recording=LOW1, audit=AUDIT, check=CHECK, head_tokens=4
)
TRAINER = Trainer(
    CFG, EVERYTHING, BF16, optax.sgd(0.1), temperature=0.7, replay_routes=True,
    objective=Objective(), audit=AUDIT, check=CHECK,
)  # fmt: skip
B, P = 8, 4
ADVANTAGE_B = np.array([1.5, -0.5, -1.5, 1, 3, 3, 3, 3], np.float32)
KEEP_B = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)  # the second group of four is dropped


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with tiny_run.quick_compiles(tiny_run.compiled_programs(tmp_path_factory)):
        yield


@pytest.fixture(scope="module")
def rollout():
    packed = packing.pack_jit(masters(), EVERYTHING, BF16)
    length = np.array([4, 2, 3, 4, 1, 4, 2, 3], np.int32)
    prompts = np.where(np.arange(P) < length[:, None], tokens(B, P), 0)
    return SAMPLER(packed, prompts, length, jax.random.key(5), np.arange(B), 0.7)


@pytest.fixture(scope="module")
def batch(rollout):
    return TrainBatch(rollout, ADVANTAGE_B, KEEP_B, jax.random.key(9))


@functools.cache
def moved():
    """Masters after an imagined update: ratios on both sides of the clip and beyond the cap."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda w: w * np.exp(0.1 * rng.normal(size=w.shape)), masters())


graded = jax.jit(jax.value_and_grad(TRAINER.loss, has_aux=True))


def by_hand(logits_BTV, rollout, keep_B=KEEP_B):
    """Loss and metrics of a batch from its logits, in float64 numpy, token by token."""
    tokens_BT, rollout_logp_BT = np.asarray(rollout.tokens_BT), np.asarray(rollout.logp_BT)
    logits_BTV = np.asarray(logits_BTV, np.float64) / 0.7
    losses, ratios, clipped, entropies = [], [], [], []
    for b in range(B):
        for t in range(int(rollout.prompt_length_B[b]), int(rollout.length_B[b])):
            logp_V = logits_BTV[b, t - 1] - np.log(np.sum(np.exp(logits_BTV[b, t - 1])))
            entropies.append(-np.sum(np.exp(logp_V) * logp_V))
            if keep_B[b]:
                ratio = np.exp(logp_V[tokens_BT[b, t]] - rollout_logp_BT[b, t])
                surrogate = min(ratio, 5.0) * ADVANTAGE_B[b]
                bounded = np.clip(min(ratio, 5.0), 0.8, 1.28) * ADVANTAGE_B[b]
                losses.append(-min(surrogate, bounded))
                ratios.append(ratio)
                clipped.append(bounded < surrogate)
    return {
        "train/loss": np.mean(losses),
        "policy/importance_ratio": np.mean(ratios),
        "policy/clipped_share": np.mean(clipped),
        "policy/capped_share": np.mean(np.array(ratios) > 5),
        "policy/entropy_nats": np.mean(entropies),
    }


def test_the_loss_is_the_one_computed_by_hand(rollout, batch):
    (loss, metrics), _ = graded(moved(), batch)
    logits = jax.jit(TRAINER.forward)(moved(), rollout).logits
    expected = by_hand(logits, rollout)
    assert loss == metrics["train/loss"]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0.1 < expected["policy/clipped_share"] < 0.9  # the case is not a trivial one


def test_on_policy_the_ratio_is_one(batch):
    """Same weights, same code, the rollout's rounding: nothing is left between the two sides."""
    (loss, metrics), _ = graded(masters(), batch)
    assert metrics["policy/importance_ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/clipped_share"] == metrics["policy/capped_share"] == 0
    assert metrics["mismatch/logp_abs_max"] < 1e-5
    for name in ("code_rate", "scale_rate", "route_rate"):
        assert metrics[f"mismatch/{name}"] == 0
    assert metrics["guidance/out_of_bracket_rate"] == 0
    assert metrics["guidance/rows_restored"] == 1
    rollout = jax.device_get(batch.rollout)
    counted_B = KEEP_B * (rollout.length_B - rollout.prompt_length_B)
    assert loss == pytest.approx(-np.sum(ADVANTAGE_B * counted_B) / np.sum(counted_B), abs=1e-5)


def test_dropped_groups_contribute_nothing(batch):
    garbage = jnp.where(KEEP_B[:, None] == 1, batch.rollout.logp_BT, -50.0)
    other = dataclasses.replace(
        batch,
        rollout=dataclasses.replace(batch.rollout, logp_BT=garbage),
        advantage_B=np.where(KEEP_B == 1, ADVANTAGE_B, -7).astype(np.float32),
    )
    (loss, _), grads = graded(moved(), batch)
    (other_loss, _), other_grads = graded(moved(), other)
    assert loss == other_loss
    assert jax.tree.all(jax.tree.map(np.array_equal, grads, other_grads))
    nothing = dataclasses.replace(batch, keep_B=np.zeros_like(KEEP_B))
    (loss, metrics), grads = graded(moved(), nothing)
    assert loss == metrics["policy/importance_ratio"] == 0
    assert jax.tree.all(jax.tree.map(lambda g: not np.any(g), grads))
    assert np.isfinite(metrics["mismatch/logp_abs_mean"])


def test_the_gradient_reaches_every_master_and_nothing_of_the_rollout(batch):
    _, grads = graded(moved(), batch)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.all(np.isfinite(grad)), path
        assert np.any(grad), path

    def of_the_record(logp_BT, outer, scales):
        guides = {
            site: dataclasses.replace(guide, outer=outer[site], scales=scales[site])
            for site, guide in batch.rollout.guidance.guides.items()
        }
        guidance = dataclasses.replace(batch.rollout.guidance, guides=guides)
        recorded = dataclasses.replace(batch.rollout, logp_BT=logp_BT, guidance=guidance)
        return TRAINER.loss(moved(), dataclasses.replace(batch, rollout=recorded))[0]

    guides = batch.rollout.guidance.guides
    outer, scales = ({s: getattr(g, n) for s, g in guides.items()} for n in ("outer", "scales"))
    grads = jax.jit(jax.grad(of_the_record, argnums=(0, 1, 2)))(
        batch.rollout.logp_BT, outer, scales
    )
    assert jax.tree.all(jax.tree.map(lambda g: not np.any(np.asarray(g, np.float32)), grads))


def test_an_update_descends_that_gradient(batch):
    (_, expected), grads = graded(moved(), batch)
    state = train_state.create(jax.tree.map(jnp.copy, moved()), TRAINER.transformation)
    state, metrics = TRAINER.update(state, batch)
    stepped = jax.tree.map(lambda w, g: w - 0.1 * g, moved(), grads)
    for new, wanted in zip(*map(jax.tree.leaves, (state.params, stepped)), strict=True):
        np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)
    assert metrics["train/loss"] == pytest.approx(float(expected["train/loss"]), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-4)
    assert state.step == 0  # a version may take several updates; the run counts them


# -- the trainer's own old log-probs ---------------------------------------------------------------

DECOUPLED = dataclasses.replace(TRAINER, old_log_probs="trainer")
decoupled = jax.jit(jax.value_and_grad(DECOUPLED.loss, has_aux=True))


def test_one_update_against_the_trainer_itself_is_the_policy_gradient(batch):
    """Where both sides agree it is the gradient of the ratio to the rollout, too, up to sums."""
    (_, metrics), grads = decoupled(masters(), batch)
    assert metrics["policy/importance_ratio"] == 1
    assert metrics["policy/clipped_share"] == metrics["policy/capped_share"] == 0
    _, bypassed = graded(masters(), batch)
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, bypassed)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3 * np.abs(theirs).max())
    (_, metrics), _ = decoupled(moved(), batch)
    assert metrics["policy/importance_ratio"] == 1
    assert metrics["mismatch/logp_abs_mean"] > 0.1  # which the ratio does not carry


def test_later_updates_compare_with_what_the_first_one_saw(batch):
    """Carried log-probs of the old weights; at these they are the rollout's, which are not read."""
    unread = dataclasses.replace(batch.rollout, logp_BT=batch.rollout.logp_BT - 3)
    carried = DECOUPLED.with_old_log_probs(masters(), dataclasses.replace(batch, rollout=unread))
    real = np.asarray(batch.rollout.mask_BT) == 1
    np.testing.assert_allclose(carried.old_logp_BT[real], batch.rollout.logp_BT[real], atol=1e-5)
    (loss, metrics), _ = decoupled(moved(), carried)
    (expected, theirs), _ = graded(moved(), batch)
    assert loss == pytest.approx(float(expected), rel=1e-4)
    for name in ("importance_ratio", "clipped_share", "capped_share"):
        assert metrics[f"policy/{name}"] == pytest.approx(float(theirs[f"policy/{name}"]), rel=1e-4)


@pytest.mark.parametrize("guided", [True, False])
def test_old_log_probs_follow_what_their_updates_follow(rollout, batch, guided):
    """Guidance and noise included: before an update nothing was learned, and the ratio is 1."""
    trainer = dataclasses.replace(DECOUPLED, engine_noise=0.02)
    if not guided:
        batch = dataclasses.replace(batch, rollout=dataclasses.replace(rollout, guidance=None))
    metrics = metrics_of(trainer, trainer.with_old_log_probs(masters(), batch))
    assert metrics["policy/importance_ratio"] == pytest.approx(1, abs=1e-6)
    mismatched = metrics["mismatch/logp_abs_mean"] > 1e-2
    assert mismatched != guided


def test_the_heads_of_both_sides_line_up(batch):
    """Under equal distributions each position's head meets itself, and there is no drift to take.

    Read one position off, they would be apart.
    """
    trainer = dataclasses.replace(DECOUPLED, objective=Objective(correction="score_centering"))
    (loss, metrics), grads = jax.jit(jax.value_and_grad(trainer.loss, has_aux=True))(
        masters(), batch
    )
    (plain, _), plain_grads = decoupled(masters(), batch)
    assert loss == pytest.approx(float(plain), abs=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, plain_grads)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3 * np.abs(theirs).max())
    assert metrics["policy/correction_ratio"] == pytest.approx(1, abs=1e-5)
    head = jax.device_get(batch.rollout.head)
    apart = np.abs(head.logp_BTH[:, 1:] - head.logp_BTH[:, :-1])
    assert np.median(apart[np.asarray(batch.rollout.mask_BT)[:, :-1] == 1]) > 0.1


# -- emulated engines ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def metrics_of(trainer, batch):
    return trainer.loss(masters(), batch)[1]


def test_noise_of_another_engine_moves_unguided_codes_only(rollout, batch):
    noisy = dataclasses.replace(TRAINER, engine_noise=0.002)
    unguided = dataclasses.replace(rollout, guidance=None)
    qat = metrics_of(
        dataclasses.replace(noisy, replay_routes=False),
        dataclasses.replace(batch, rollout=unguided),
    )
    assert qat["mismatch/code_rate"] > 0.005
    assert qat["guidance/rows_restored"] < 0.1  # their outer scales differ already
    assert "guidance/out_of_bracket_rate" not in qat
    trace = metrics_of(noisy, batch)
    assert trace["mismatch/code_rate"] == trace["mismatch/scale_rate"] == 0
    assert trace["guidance/out_of_bracket_rate"] == 0
    assert trace["guidance/rows_restored"] == 1
    assert trace["mismatch/logp_abs_mean"] < qat["mismatch/logp_abs_mean"] / 100
    again = metrics_of(noisy, batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, trace))


def test_no_noise_is_no_noise(batch):
    """Not a forward with a noise of zero: that of a trainer without, to the last bit."""
    assert TRAINER.noise(batch.noise_key) is None
    silent = jax.jit(TRAINER.forward)(masters(), batch.rollout).logits

    @jax.jit
    def with_zero_noise(params):
        noise = EngineNoise(batch.noise_key, 0.0)
        return decoder.forward(
            params, batch.rollout.tokens_BT, CFG, policy=EVERYTHING, dtype=BF16,
            guidance=batch.rollout.guidance, routes_LBTA=batch.rollout.routes_LBTA, noise=noise,
        ).logits  # fmt: skip

    np.testing.assert_allclose(silent, with_zero_noise(masters()), atol=1e-5)


# -- what is counted -------------------------------------------------------------------------------


def test_inputs_that_the_rollout_computed(rollout):
    """Every token but the last drawn, which was never fed back."""
    valid_BT = np.asarray(valid_inputs(rollout))
    for row, length in zip(valid_BT, np.asarray(rollout.length_B), strict=True):
        assert row.tolist() == [1] * (length - 1) + [0] * (len(row) - length + 1)


def test_out_of_bracket_counts_guided_sites_and_layers_only(batch):
    """Under a guide of the last layer and two sites: their codes that differ, of all of theirs."""
    kept = tuple((site, (1,)) for site in ("attention/k", "experts/in"))
    guides = {site: jax.tree.map(lambda a: a[1:], batch.rollout.guidance.guides[site])
              for site, _ in kept}  # fmt: skip
    rollout = dataclasses.replace(batch.rollout, guidance=Guidance(guides, kept))
    noisy = dataclasses.replace(TRAINER, engine_noise=0.05)
    out = jax.jit(noisy.forward)(masters(), rollout, noisy.noise(batch.noise_key))
    metrics = jax.jit(noisy.mismatch_metrics)(out, rollout)
    valid_BT = np.asarray(valid_inputs(rollout))[:6].astype(bool)
    differ = [
        (ours != theirs)[valid_BT]
        for site, _ in kept
        for ours, theirs in [
            (unpacked(out.recorded[0].guides[site], 1), unpacked(rollout.audit.guides[site], 1))
        ]
    ]
    expected = sum(d.sum() for d in differ) / sum(d.size for d in differ)
    assert 0 < expected < 0.5
    assert metrics["guidance/out_of_bracket_rate"] == pytest.approx(expected, rel=1e-5)
    assert metrics["mismatch/code_rate"] > metrics["guidance/out_of_bracket_rate"]


def unpacked(guide, layer):
    """Codes of one layer, one a byte."""
    return np.asarray(e2m1.unpack_bits(guide.bits[layer], 4))


@pytest.mark.parametrize("sites", [("*",), ("experts/mid",)])
def test_guiding_sites_that_are_not_audited(sites):
    """The hidden rows of experts have no full codes to compare with; guiding them must not fail."""
    recording = record.recording("low1", sites, "all", SITE_LAYERS, EVERYTHING)
    sampler = dataclasses.replace(SAMPLER, recording=recording)
    packed = jax.eval_shape(lambda: packing.pack(masters(), EVERYTHING, BF16))
    ids = jax.ShapeDtypeStruct((B,), jnp.int32)
    prompts = jax.ShapeDtypeStruct((B, P), jnp.int32)
    sampled = jax.eval_shape(sampler, packed, prompts, ids, jax.random.key(0), ids, 1.0)
    assert "experts/mid" in sampled.guidance.guides
    assert "experts/mid" not in sampled.audit.guides
    batch = TrainBatch(sampled, ADVANTAGE_B, KEEP_B, jax.random.key(0))
    _, metrics = jax.eval_shape(TRAINER.loss, masters(), batch)
    assert ("guidance/out_of_bracket_rate" in metrics) == (sites == ("*",))


def test_the_warm_up_learns_the_masked_tokens():
    warm_up = WarmUp(CFG, BF16, optax.sgd(0.1))
    tokens_BT, mask_BT = tokens(2, 7), np.array([[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]])
    state = train_state.create(jax.tree.map(jnp.copy, masters()), warm_up.transformation)
    state, loss = warm_up.update(state, tokens_BT, mask_BT.astype(np.float32))
    out = jax.jit(decoder.forward, static_argnums=2, static_argnames=("policy", "dtype"))(
        masters(), tokens_BT, CFG, policy=NOTHING, dtype=BF16
    )
    logp_BTV = np.asarray(jax.nn.log_softmax(out.logits))
    picked = [logp_BTV[b, t - 1, tokens_BT[b, t]] for b, t in np.argwhere(mask_BT)]
    assert loss == pytest.approx(-np.mean(picked), rel=1e-4)
    _, lower = warm_up.update(state, tokens_BT, mask_BT.astype(np.float32))
    assert lower < loss
