"""The indexer and its selection against loops in float64 written from the equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_hyper_connection import BF16, FLOAT32, values
from trace_jax.models import config, sparse_attention
from trace_jax.models.architecture import IndexerConfig
from trace_jax.models.sparse_attention import Indexer

CFG = config.tiny(config.get("qwen3_8_flash_next"))
INDEXER = CFG.indexer
B, D, H, C = 2, CFG.hidden_size, INDEXER.num_heads, INDEXER.head_dim
MOST = INDEXER.budget // INDEXER.block
T = 4 * INDEXER.block + 3  # four blocks, of which a late query may take two, and a part of one
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))
SHAPES = {"qk": ((H + 1) * C, D), "q_norm": {"scale": (C,)}, "k_norm": {"scale": (C,)}}
PARAMS, X = values(SHAPES), values((B, T, D), seed=1)


def index(params, x_BTD, positions_BT, context=FLOAT32):
    return Indexer(CFG).apply({"params": params}, x_BTD, positions_BT, context)


def choose(params, q_BTHC, key_BSC, positions_BT):
    inputs = (q_BTHC, key_BSC, positions_BT)
    return Indexer(CFG).apply({"params": params}, *inputs, method="select")


indexed, chosen = jax.jit(index), jax.jit(choose)


def norm(x, scale):
    x, scale = np.float64(x), np.float64(scale)
    return (1 + scale) * x / np.sqrt(np.mean(x * x) + CFG.rms_norm_eps)


def rotate(x, position):
    """The first rotary_dim values rotated in pairs (c, c + half); the others as they are."""
    half = CFG.rotary_dim // 2
    y = x.copy()
    for c in range(half):
        angle = position * CFG.rope_theta ** (-c / half)
        y[c] = x[c] * np.cos(angle) - x[c + half] * np.sin(angle)
        y[c + half] = x[c + half] * np.cos(angle) + x[c] * np.sin(angle)
    return y


def oracle_queries(params, x_BTD):
    w = np.float64(params["qk"])
    q = np.zeros((*x_BTD.shape[:2], H, C))
    for b, t, h in np.ndindex(q.shape[:3]):
        raw = w[h * C : (h + 1) * C] @ np.float64(x_BTD[b, t])
        q[b, t, h] = rotate(norm(raw, params["q_norm"]["scale"]), t)
    return q


def oracle_selection(params, q_BTHC, key_BSC, positions_BT):
    """The selection [B, T, S], and the least gap between a block that is in and one that is out."""
    selected, gap = np.zeros((*q_BTHC.shape[:2], key_BSC.shape[1]), bool), np.inf
    for b, t in np.ndindex(q_BTHC.shape[:2]):
        p, size = int(positions_BT[b, t]), INDEXER.block
        scores = []
        for block in range((p + 1) // size):
            mean = np.float64(key_BSC[b, block * size : (block + 1) * size]).mean(0)
            key = rotate(norm(mean, params["k_norm"]["scale"]), block * size)
            dots = [np.float64(q_BTHC[b, t, h]) @ key for h in range(H)]
            scores.append(sum(max(dot, 0) for dot in dots) / np.sqrt(C))
        order = sorted(range(len(scores)), key=lambda block: (-scores[block], block))
        for block in order[:MOST]:
            selected[b, t, block * size : (block + 1) * size] = True
        selected[b, t, (p + 1) // size * size : p + 1] = True
        if len(order) > MOST and scores[order[MOST - 1]] > 0:
            gap = min(gap, scores[order[MOST - 1]] - scores[order[MOST]])
    return selected, gap


def test_queries_are_normed_and_rotated_and_keys_are_raw():
    q, key = indexed(PARAMS, X, POSITIONS)
    np.testing.assert_allclose(q, oracle_queries(PARAMS, X), atol=1e-5)
    np.testing.assert_allclose(key, np.float64(X) @ np.float64(PARAMS["qk"][H * C :]).T, atol=1e-5)
    assert q.dtype == key.dtype == jnp.float32


def test_the_best_blocks_and_the_tail():
    q, key = indexed(PARAMS, X, POSITIONS)
    selected = chosen(PARAMS, q, key, POSITIONS)
    expected, gap = oracle_selection(PARAMS, q, key, POSITIONS)
    assert gap > 1e-4
    assert np.array_equal(selected, expected)

    # A query sees p + 1 tokens: two blocks of them at most, and one to three of an incomplete one.
    seen = np.arange(1, T + 1)
    most = np.minimum(seen // INDEXER.block, MOST) * INDEXER.block + seen % INDEXER.block
    assert np.array_equal(selected.sum(-1), np.broadcast_to(most, (B, T)))
    assert np.any(selected.sum(-1) < seen)


def test_a_query_reads_everything_while_it_fits():
    length = MOST * INDEXER.block + INDEXER.block - 1
    q, key = indexed(PARAMS, X, POSITIONS)
    selected = chosen(PARAMS, q[:, :length], key[:, :length], POSITIONS[:, :length])
    assert np.array_equal(selected, np.broadcast_to(np.tri(length, dtype=bool), selected.shape))


def test_decode_chooses_as_the_whole_sequence_does():
    """Each sequence at a position of its own, in a cache that is longer and not yet written."""
    q, key = indexed(PARAMS, X, POSITIONS)
    whole = np.asarray(chosen(PARAMS, q, key, POSITIONS))
    step = jax.jit(choose)
    for at in ([3, 14], [11, 18], [12, 7], [15, 16]):
        rows, at = np.arange(B), jnp.array(at)
        cached = jnp.pad(key, ((0, 0), (0, 6), (0, 0)), constant_values=jnp.nan)
        cached = jnp.where(jnp.arange(T + 6)[None, :, None] <= at[:, None, None], cached, jnp.nan)
        selected = step(PARAMS, q[rows, at][:, None], cached, at[:, None])
        assert np.array_equal(selected[:, 0, :T], whole[rows, at])
        assert not np.any(selected[:, 0, T:])


def test_the_budget_of_the_true_model_begins_to_matter_at_2052_tokens():
    true = config.get("qwen3_8_flash_next").indexer
    length, last = 2056, jnp.array([[2050, 2051, 2055]])
    q = values((1, 3, true.num_heads, true.head_dim))
    key = values((1, length // true.block, true.head_dim), seed=1)
    select = jax.jit(sparse_attention.select, static_argnums=(3, 4))
    selected = select(q, key, last, length, true)
    assert selected.sum(-1).tolist() == [[2051, 2048, 2048]]


def test_blocks_of_equal_score_go_to_the_lower_one():
    q = jnp.zeros((B, T, H, C))
    _, key = indexed(PARAMS, X, POSITIONS)
    selected = chosen(PARAMS, q, key, POSITIONS)
    assert np.array_equal(selected, oracle_selection(PARAMS, q, key, POSITIONS)[0])
    assert np.array_equal(selected[0, T - 1], [True] * 8 + [False] * 8 + [True] * 3)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_highest_are_those_of_top_k(count):
    rng = np.random.default_rng(count)
    scores = jnp.asarray(rng.choice([-np.inf, 0, 0.5, 1], (50, 6)), jnp.float32)
    _, expected = jax.lax.top_k(scores, count)
    mask = sparse_attention.highest(scores, count)
    assert [np.flatnonzero(row).tolist() for row in mask] == np.sort(expected, -1).tolist()


def test_keys_of_a_bfloat16_cache_are_those_of_the_forward():
    q, key = jax.jit(functools.partial(index, context=BF16))(PARAMS, X, POSITIONS)
    assert key.dtype == jnp.bfloat16
    assert q.dtype == jnp.float32
    expected, gap = oracle_selection(PARAMS, q, np.float32(key), POSITIONS)
    assert gap > 1e-4
    assert np.array_equal(chosen(PARAMS, q, key, POSITIONS), expected)


def test_the_choice_has_no_gradient():
    def attended(params, x):
        q, key = index(params, x, POSITIONS)
        return jnp.sum(jnp.where(choose(params, q, key, POSITIONS), 1.0, 0.0) * jnp.sum(x))

    by_params, by_x = jax.jit(jax.grad(attended, (0, 1)))(PARAMS, X)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(by_params))
    assert np.all(by_x == by_x[0, 0, 0])


def test_a_head_smaller_than_its_rotation_is_refused():
    small = IndexerConfig(num_heads=2, head_dim=4, budget=8, block=4)
    with pytest.raises(ValueError, match=r"model\.indexer\.head_dim=4 is less than the 8 values"):
        dataclasses.replace(CFG, indexer=small)
