"""The sampling loop: draws, log-probs, stops and masks, places in the batch, what it records."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.small_model import (
    CFG,
    EVERYTHING,
    SITE_LAYERS,
    UNOPTIMIZED,
    masters,
    quick_forward,
)
from trace_jax.guidance import record
from trace_jax.models import packing
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Sampler

FLOAT32 = jnp.dtype("float32")
RECORDING = record.recording("low1", ("*",), "latter_half", SITE_LAYERS, EVERYTHING)
AUDIT = dataclasses.replace(
    record.recording("codes", ("*",), "all", SITE_LAYERS, EVERYTHING), sequences=2
)
STOP, PAD = (3, 17), 0
SAMPLER = Sampler(
    CFG, EVERYTHING, FLOAT32, max_new_tokens=6, stop_ids=STOP, pad_id=PAD,
    recording=RECORDING, audit=AUDIT, head_tokens=3,
)  # fmt: skip
B, P, N = 8, 5, SAMPLER.max_new_tokens
PROMPT_LENGTH = np.array([5, 2, 3, 1, 4, 5, 2, 3], np.int32)
KEY = jax.random.key(7)


def prompts():
    """Random prompts int32 [B, P], padded with PAD."""
    draw = np.random.default_rng(0).integers(4, 16, (B, P))
    return np.where(np.arange(P) < PROMPT_LENGTH[:, None], draw, PAD).astype(np.int32)


@functools.cache
def packed():
    return jax.jit(packing.pack, static_argnums=(1, 2))(masters(), EVERYTHING, FLOAT32)


def draw(
    weights=None, prompts_BP=None, length_B=PROMPT_LENGTH, key=KEY, ids=range(B), temperature=1.0
):
    """A Rollout on the host; the arguments have one type each, so that one program serves all."""
    weights = packed() if weights is None else weights
    prompts_BP = prompts() if prompts_BP is None else prompts_BP
    ids = np.array(ids, np.int32)
    return jax.device_get(SAMPLER(weights, prompts_BP, length_B, key, ids, float(temperature), 4))


@functools.cache
def sample(temperature=1.0):
    return draw(temperature=temperature)


def completions(rollout):
    """Each sequence's new tokens, as lists."""
    ends = zip(rollout.tokens_BT, rollout.prompt_length_B, rollout.length_B, strict=True)
    return [row[start:end].tolist() for row, start, end in ends]


def test_sequences_lie_right_padded_prompt_then_completion():
    rollout = sample()
    assert rollout.tokens_BT.shape == (B, P + N)
    assert int(rollout.version) == 4
    for row, prompt, start, end in zip(
        rollout.tokens_BT, prompts(), PROMPT_LENGTH, rollout.length_B, strict=True
    ):
        assert np.array_equal(row[:start], prompt[:start])
        assert np.all(row[end:] == PAD)
        assert start < end <= start + N


def test_a_stop_token_ends_a_sequence_and_the_limit_ends_the_others():
    rollout = sample()
    news = completions(rollout)
    stopped = [new for new in news if new[-1] in STOP]
    assert 2 <= len(stopped) < B
    assert len({len(new) for new in stopped}) > 1  # some while others go on
    for new in news:
        assert not set(new[:-1]) & set(STOP)
        assert len(new) == N or new[-1] in STOP


def test_mask_and_log_probs_cover_completion_tokens_only():
    rollout = sample()
    mask_BT = np.zeros((B, P + N), np.float32)
    for b in range(B):
        mask_BT[b, PROMPT_LENGTH[b] : rollout.length_B[b]] = 1
    assert np.array_equal(rollout.mask_BT, mask_BT)
    assert np.all(rollout.logp_BT[mask_BT == 1] < 0)
    assert np.all(rollout.logp_BT[mask_BT == 0] == 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_log_probs_are_those_of_the_full_forward(temperature):
    """Prefill, then one token at a time through the cache, against all tokens at once."""
    rollout = sample(temperature)
    out = quick_forward(
        masters(), jnp.asarray(rollout.tokens_BT), CFG, policy=EVERYTHING, dtype=FLOAT32
    )
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, temperature)
    np.testing.assert_allclose(logp_BT * rollout.mask_BT, rollout.logp_BT, atol=1e-5)
    fed = np.arange(P + N) < rollout.length_B[:, None] - 1  # the last token is drawn, not fed back
    assert np.array_equal(out.routes_LBTA[:, fed], rollout.routes_LBTA[:, fed])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_is_that_of_what_each_token_was_drawn_from(temperature):
    """The likeliest tokens first, at the temperature of the draw, none outside the completion."""
    rollout = sample(temperature)
    out = quick_forward(
        masters(), jnp.asarray(rollout.tokens_BT), CFG, policy=EVERYTHING, dtype=FLOAT32
    )
    logp_BTV = np.asarray(log_probs.log_softmax(out.logits, temperature))
    tokens_BTH, logp_BTH = rollout.head
    assert tokens_BTH.shape == (B, P + N, 3)
    for b, t in np.argwhere(rollout.mask_BT):
        best = np.argsort(-logp_BTV[b, t - 1])[:3]
        assert tokens_BTH[b, t].tolist() == best.tolist()
        np.testing.assert_allclose(logp_BTH[b, t], logp_BTV[b, t - 1, best], atol=1e-5)
        drawn = tokens_BTH[b, t] == rollout.tokens_BT[b, t]
        assert np.all(logp_BTH[b, t, drawn] == rollout.logp_BT[b, t])
    assert not np.any(logp_BTH[rollout.mask_BT == 0])
    ours_BTH = log_probs.of_head(out.logits, tokens_BTH, temperature)
    real = rollout.mask_BT == 1
    np.testing.assert_allclose(ours_BTH[real], logp_BTH[real], atol=1e-5)


def test_greedy_takes_the_most_likely_token_whatever_the_key():
    rollout = sample(0.0)
    out = quick_forward(
        masters(), jnp.asarray(rollout.tokens_BT), CFG, policy=EVERYTHING, dtype=FLOAT32
    )
    best_BT = np.pad(np.argmax(out.logits, -1)[:, :-1], ((0, 0), (1, 0)))
    mask = rollout.mask_BT == 1
    assert np.array_equal(rollout.tokens_BT[mask], best_BT[mask])
    other = draw(key=jax.random.key(8), temperature=0.0)
    assert np.array_equal(other.tokens_BT, rollout.tokens_BT)
    assert not np.array_equal(sample(1.0).tokens_BT, rollout.tokens_BT)


def test_a_sample_does_not_depend_on_its_place_in_the_batch():
    rollout = sample()
    order = np.array([6, 3, 0, 7, 1, 5, 2, 4])
    moved = draw(None, prompts()[order], PROMPT_LENGTH[order], ids=order)
    assert np.array_equal(moved.tokens_BT, rollout.tokens_BT[order])
    assert np.array_equal(moved.length_B, rollout.length_B[order])
    assert np.array_equal(moved.logp_BT, rollout.logp_BT[order])
    for ours, other in zip(*map(jax.tree.leaves, (moved.guidance, rollout.guidance)), strict=True):
        fed = np.arange(P + N) < rollout.length_B[order][:, None] - 1
        assert np.array_equal(np.asarray(ours)[:, fed], other[:, order][:, fed])


def test_one_prompt_with_different_ids_gives_different_samples():
    same = np.tile(prompts()[:1], (B, 1))
    lengths = np.full(B, PROMPT_LENGTH[0], np.int32)
    rollout = draw(None, same, lengths)
    assert len(set(map(tuple, completions(rollout)))) >= B - 1
    again = draw(None, same, lengths, ids=[0] * B)
    assert len(set(map(tuple, completions(again)))) == 1


def test_what_stands_in_the_prompts_padding_does_not_matter():
    noise = np.random.default_rng(1).integers(0, CFG.vocab_size, (B, P))
    dirty = np.where(np.arange(P) < PROMPT_LENGTH[:, None], prompts(), noise)
    rollout = draw(None, dirty.astype(np.int32))
    assert np.array_equal(rollout.tokens_BT, sample().tokens_BT)
    assert np.array_equal(rollout.logp_BT, sample().logp_BT)


def test_the_loop_ends_with_the_last_sequence():
    """Where all stop at their first token no decode step runs: that token is never fed back."""
    direction = jax.random.normal(jax.random.key(0), (CFG.hidden_size,))
    head = (
        jnp.zeros((CFG.vocab_size, CFG.hidden_size))
        .at[STOP, :]
        .set(
            jnp.stack([1e3 * direction, -1e3 * direction])  # one of the two is always far ahead
        )
    )
    rollout = draw(dict(packed(), head=head))
    assert np.array_equal(rollout.length_B, PROMPT_LENGTH + 1)
    assert all(new[0] in STOP for new in completions(rollout))
    scales = rollout.audit.guides["experts/in"].scales
    assert np.all(np.asarray(scales[:, 0, : PROMPT_LENGTH[0]], np.float32).any(-1))
    assert not np.any(np.asarray(scales[:, 0, PROMPT_LENGTH[0] :], np.float32))


def test_stop_tokens_are_optional():
    endless = dataclasses.replace(SAMPLER, stop_ids=())
    shapes = jax.eval_shape(endless, packed(), prompts(), PROMPT_LENGTH, KEY, np.arange(B), 1.0)
    assert shapes.tokens_BT.shape == (B, P + N)


def test_record_lines_up_with_the_tokens_of_training():
    """The low bits kept of the latter half are those of the audit's full codes, token by token."""
    rollout = sample()
    assert {layers for _, layers in rollout.guidance.layers} == {(1,)}
    assert {layers for _, layers in rollout.audit.layers} == {(0, 1)}
    reduced = record.reduce(rollout.audit, dataclasses.replace(RECORDING, sequences=2))
    first = jax.tree.map(lambda a: a[:, :2], rollout.guidance)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, reduced))


def test_training_forward_follows_the_record_to_the_rollouts_codes():
    rollout = sample()
    everything = dataclasses.replace(AUDIT, sequences=None)
    out = quick_forward(
        masters(), jnp.asarray(rollout.tokens_BT), CFG, policy=EVERYTHING, dtype=FLOAT32,
        guidance=rollout.guidance, routes_LBTA=rollout.routes_LBTA, records=(everything,),
    )  # fmt: skip
    fed = np.arange(P + N) < rollout.length_B[:2, None] - 1
    for site, ours in out.recorded[0].guides.items():
        theirs = rollout.audit.guides[site]
        assert ours.encoding == theirs.encoding == "codes"
        assert np.array_equal(np.asarray(ours.bits)[:, :2][:, fed], theirs.bits[:, fed])
        assert np.array_equal(np.asarray(ours.scales)[:, :2][:, fed], theirs.scales[:, fed])


def quick_sample(sampler, *arguments):
    """A sample by a program compiled in half the time."""
    program = Sampler.__call__.lower(sampler, *arguments).compile(UNOPTIMIZED)
    return program(*arguments)


def test_weights_unpacked_once_or_at_every_token_give_the_same_sample():
    every_token = dataclasses.replace(
        SAMPLER, unpack_once=False, recording=None, audit=None, head_tokens=0
    )
    rollout = quick_sample(every_token, packed(), prompts(), PROMPT_LENGTH, KEY, np.arange(B), 1.0)
    assert rollout.guidance is None
    assert rollout.audit is None
    assert rollout.head is None
    assert np.array_equal(rollout.tokens_BT, sample().tokens_BT)
    np.testing.assert_allclose(rollout.logp_BT, sample().logp_BT, atol=1e-5)


def test_truncated_draws_carry_the_log_of_the_mass_they_came_from():
    truncated = dataclasses.replace(SAMPLER, top_p=0.5, recording=None, audit=None)
    rollout = quick_sample(truncated, packed(), prompts(), PROMPT_LENGTH, KEY, np.arange(B), 1.0)
    out = quick_forward(
        masters(), jnp.asarray(rollout.tokens_BT), CFG, policy=EVERYTHING, dtype=FLOAT32
    )
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, 1.0)
    drawn = np.asarray(rollout.mask_BT) == 1
    mass = np.exp(rollout.log_mass_BT)[drawn]
    assert np.all(rollout.log_mass_BT[~drawn] == 0)
    assert np.all((mass >= 0.5 - 1e-6) & (mass < 1))
    np.testing.assert_allclose(
        (logp_BT - rollout.log_mass_BT)[drawn], rollout.logp_BT[drawn], atol=1e-5
    )
    assert sample().log_mass_BT is None
