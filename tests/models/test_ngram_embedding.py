"""The n-gram hash against Python integers, the embedding against float64, tables on the host."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.models.test_hyper_connection import BF16, FLOAT32, sigmoid, values
from trace_jax.models import config, ngram_embedding
from trace_jax.models.ngram_embedding import HostTable, NgramEmbedding
from trace_jax.parallel.mesh import make_mesh

TRUE = config.get("qwen3_8_flash_next")
CFG = config.tiny(TRUE)
NGRAM, EOS = CFG.ngram, CFG.ngram.eos_id
B, T, D, STREAMS = 2, 12, CFG.hidden_size, CFG.hyper_connection.streams
N, TAPS = STREAMS * D, NGRAM.conv_size
ROWS = config.ngram_rows(NGRAM, 0)
SHAPES = {
    "key": (N, NGRAM.embed_dim),
    "value": (D, NGRAM.embed_dim),
    "key_norm": {"scale": (N,)},
    "query_norm": {"scale": (N,)},
    "conv_norm": {"scale": (N,)},
    "conv": (N, TAPS),
    "table": (ROWS, NGRAM.row_width),
}
PARAMS, X = values(SHAPES), values((B, T, STREAMS, D), seed=1)
TOKENS = np.random.default_rng(2).integers(0, CFG.vocab_size, (B, T))
TOKENS[0, [4, 9]] = EOS
TOKENS[1, [0, 6, 7]] = EOS
TOKENS = jnp.asarray(TOKENS, jnp.int32)


# The hash. ------------------------------------------------------------------------------------


def oracle_primes(ngram, ordinal):
    """The primes of a layer's heads: all layers' heads in one row, counted from the base."""
    found, candidate = [], ngram.vocab_size_base
    while len(found) < ngram.heads * (ordinal + 1):
        if candidate >= 2 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return found[ngram.heads * ordinal :]


def oracle_multipliers(ngram, vocab_size, ordinal):
    gamma, wrap = 0x9E3779B97F4A7C15, 2**64
    found = []
    for i in range(ngram.size):
        z = (ngram.seed + 10007 * ordinal + gamma * (i + 1)) % wrap
        z = (z + gamma) % wrap
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % wrap
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % wrap
        z = z ^ (z >> 31)
        half = max(1, ((2**63 - 1) // vocab_size) // 2)
        found.append(2 * (z % half) + 1)
    return found


def oracle_rows(tokens, ngram, vocab_size, ordinal):
    """The rows [T][h] of one sequence from its start, in Python integers."""
    primes = oracle_primes(ngram, ordinal)
    mu = oracle_multipliers(ngram, vocab_size, ordinal)
    rows = []
    for t in range(len(tokens)):
        seen = []
        for back in range(ngram.size):
            between = tokens[max(t - back, 0) : t]  # from that token up to the one before t
            hidden = t - back < 0 or ngram.eos_id in between
            seen.append(ngram.eos_id if hidden else tokens[t - back])
        row, offset = [], 0
        for head, prime in enumerate(primes):
            value = 0
            for k in range(head // ngram.heads_per_ngram + 2):
                value ^= seen[k] * mu[k]
            assert value < 2**63
            row.append(value % prime + offset)
            offset += prime
        rows.append(row)
    return rows


def windows(tokens, ngram):
    """Each token and those before it [T, size], ends of text ahead of the start."""
    history = [ngram.eos_id] * (ngram.size - 1) + list(tokens)
    return jnp.array([history[t : t + ngram.size][::-1] for t in range(len(tokens))], jnp.int32)


QUADS = dataclasses.replace(
    NGRAM, size=4, heads_per_ngram=1, embed_dim=48, vocab_size_base=2, seed=0, eos_id=0
)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize(
    ("ngram", "vocab"), [(TRUE.ngram, TRUE.vocab_size), (NGRAM, CFG.vocab_size), (QUADS, 3)]
)
def test_the_rows_are_those_of_exact_integers(ngram, vocab, ordinal):
    rng = np.random.default_rng(ordinal)
    extreme = [vocab - 1, vocab - 1, vocab - 1, 0, 0, 0, ngram.eos_id, vocab - 1, 1, 1]
    extreme += [ngram.eos_id, ngram.eos_id, 2, vocab - 1, ngram.eos_id, 0, vocab - 1, 0]
    tokens = [*extreme, *rng.integers(0, vocab, 300).tolist()]
    rows = ngram_embedding.table_rows(windows(tokens, ngram)[None], ngram, vocab, ordinal)
    assert rows.dtype == jnp.int32
    assert rows[0].tolist() == oracle_rows(tokens, ngram, vocab, ordinal)
    assert rows.max() < config.ngram_rows(ngram, ordinal)


def test_the_published_hash():
    """Figures of transformers 5.24 for the true sizes: multipliers, tables, rows of some heads."""
    assert ngram_embedding.multipliers(TRUE.ngram, TRUE.vocab_size, 0) == (
        23703573157769, 20109073645365, 8052911324071,
    )  # fmt: skip
    assert ngram_embedding.multipliers(TRUE.ngram, TRUE.vocab_size, 1) == (
        3352040966061, 19752442147475, 10742103100073,
    )  # fmt: skip
    primes = config.ngram_primes(TRUE.ngram, 0)
    assert (primes[0], primes[-1], sum(primes)) == (20000003, 20000171, 320001446)
    assert config.ngram_rows(TRUE.ngram, 0) == config.ngram_rows(TRUE.ngram) == 320001536
    assert config.ngram_primes(TRUE.ngram, 1)[0] == 20000213
    assert config.ngram_rows(TRUE.ngram, 1) == 320005120

    tokens = windows([248319, 0, 248044, 17, 248318, 248046], TRUE.ngram)[None]
    hashed = lambda ordinal: ngram_embedding.table_rows(tokens, TRUE.ngram, 248320, ordinal)
    assert hashed(0)[0][:, [0, 7, 8, 15]].tolist() == [
        [11864469, 148010049, 176514610, 309928373],
        [3745007, 156931756, 177662890, 305354803],
        [16421076, 145766809, 167206240, 305397995],
        [7961118, 144041389, 176216895, 308564037],
        [7545651, 155137170, 160714374, 303597389],
        [10659107, 150030060, 170932393, 306313623],
    ]
    assert hashed(1)[0, 5, [0, 7, 8, 15]].tolist() == [10568320, 153410009, 167391449, 302206800]


def test_an_end_of_text_hides_what_is_ahead_of_it():
    """Not the token after it, nor, while it is the current token, the tokens before it."""
    rows = lambda *window: ngram_embedding.table_rows(
        jnp.array([[window]], jnp.int32), NGRAM, CFG.vocab_size, 0
    ).tolist()
    assert rows(5, EOS, 7) == rows(5, EOS, 8) == rows(5, EOS, EOS)
    assert rows(EOS, 5, 7) != rows(EOS, 5, 8)
    assert rows(5, 6, EOS) != rows(5, 6, 7)


def test_64_bit_products_and_remainders():
    rng = np.random.default_rng(0)
    edges = [0, 1, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1]
    factors = [*edges, *rng.integers(0, 2**32, 20).tolist()]
    a = jnp.array(factors, jnp.uint32)
    divisors = (2, 3, 97, 20000003, 2**31 - 1)
    join = lambda pair: [(int(h) << 32) | int(low) for h, low in zip(*pair, strict=True)]
    for constant in (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, 0x123456789ABCDEF1):
        product = ngram_embedding.multiply(a, constant)
        exact = [x * constant % 2**64 for x in factors]
        assert join(product) == exact
        for some in (divisors, divisors[:3]):
            rest = ngram_embedding.remainder(product, some)
            assert rest.tolist() == [[x % d for d in some] for x in exact]


def test_a_table_beyond_int32_is_refused():
    huge = dataclasses.replace(TRUE.ngram, vocab_size_base=200_000_000)
    with pytest.raises(ValueError, match="vocab_size_base=200000000 makes a table of 32000"):
        config.ngram_rows(huge, 0)


# The embedding. -------------------------------------------------------------------------------


def embed(params, x_BTsD, tokens_BT, before=None, length_B=None, context=FLOAT32):
    module = NgramEmbedding(CFG)
    return module.apply({"params": params}, x_BTsD, tokens_BT, context, before, length_B)


embedded = jax.jit(embed)
in_bfloat16 = jax.jit(functools.partial(embed, context=BF16))


def group_norm(x, scale):
    """Each of the streams [.., s, D] normed by itself, the scale [s D] zero-centred."""
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CFG.rms_norm_eps)
    return x * (1 + scale.reshape(STREAMS, D))


def oracle(params, x_BTsD, tokens_BT):
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    delta = np.zeros((B, T, STREAMS, D))
    for b in range(B):
        rows = oracle_rows(tokens_BT[b].tolist(), NGRAM, CFG.vocab_size, 0)
        gated, normed = np.zeros((T, STREAMS, D)), np.zeros((T, N))
        for t in range(T):
            e = np.concatenate([p["table"][row] for row in rows[t]])
            key = group_norm((p["key"] @ e).reshape(STREAMS, D), p["key_norm"]["scale"])
            query = group_norm(np.float64(x_BTsD[b, t]), p["query_norm"]["scale"])
            for c in range(STREAMS):
                gate = key[c] @ query[c] / np.sqrt(D)
                gate = np.sign(gate) * np.sqrt(max(abs(gate), 1e-6))
                gated[t, c] = sigmoid(gate) * (p["value"] @ e)
            normed[t] = group_norm(gated[t], p["conv_norm"]["scale"]).reshape(-1)
        for t in range(T):
            local = np.zeros(N)
            for tap in range(TAPS):
                source = t - (TAPS - 1 - tap) * NGRAM.size
                if source >= 0:
                    local += p["conv"][:, tap] * normed[source]
            delta[b, t] = gated[t] + (local * sigmoid(local)).reshape(STREAMS, D)
    return delta


def test_the_embedding_and_its_state():
    delta, state = embedded(PARAMS, X, TOKENS)
    np.testing.assert_allclose(delta, oracle(PARAMS, X, TOKENS), atol=2e-5)
    assert delta.dtype == state.tail_BPN.dtype == jnp.float32
    assert np.array_equal(state.tokens_Bn, TOKENS[:, -2:])
    assert state.tail_BPN.shape == (B, (TAPS - 1) * NGRAM.size, N)


def test_a_padded_prefill_then_single_tokens_equal_the_whole():
    """Prompts of 5 and 1 tokens, one ending in an end of text; their padding leaves no trace."""
    whole, last = embedded(PARAMS, X, TOKENS)
    lengths, room = jnp.array([5, 1]), 6
    real = jnp.arange(room) < lengths[:, None]
    padded = jnp.where(real, TOKENS[:, :room], 99), jnp.where(real[..., None, None], X[:, :room], 7)
    delta, state = embedded(PARAMS, padded[1], padded[0], None, lengths)
    for b, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(delta[b, :length], whole[b, :length], atol=1e-5)
    assert state.tokens_Bn.tolist() == [TOKENS[0, 3:5].tolist(), [EOS, int(TOKENS[1, 0])]]

    rows = jnp.arange(B)
    for step in range(T - 5):
        at = lengths + step
        one = embedded(PARAMS, X[rows, at][:, None], TOKENS[rows, at][:, None], state)
        np.testing.assert_allclose(one[0][:, 0], whole[rows, at], atol=1e-5)
        state = one[1]
    assert np.array_equal(state.tokens_Bn[0], last.tokens_Bn[0])
    np.testing.assert_allclose(state.tail_BPN[0], last.tail_BPN[0], atol=1e-5)

    finished = embedded(PARAMS, X[:, :1], TOKENS[:, :1], state, jnp.zeros(B, jnp.int32))[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, finished, state))


def test_the_state_at_the_start():
    start = ngram_embedding.empty(CFG, B)
    assert np.array_equal(start.tokens_Bn, np.full((B, 2), EOS))
    assert not np.any(start.tail_BPN)
    first = embedded(PARAMS, X, TOKENS, start)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, embedded(PARAMS, X, TOKENS)))


def test_gradients_reach_every_parameter_and_just_the_rows_that_were_read():
    loss = lambda params: jnp.sum(embed(params, X, TOKENS)[0] ** 2)
    gradient = jax.jit(jax.grad(loss))(PARAMS)
    for leaf in jax.tree.leaves(gradient):
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf)
    read = {
        row for b in range(B) for rows in oracle_rows(TOKENS[b].tolist(), NGRAM, 272, 0)
        for row in rows
    }  # fmt: skip
    assert set(np.flatnonzero(np.any(gradient["table"], axis=-1)).tolist()) == read


def test_a_gate_of_zero_is_half_open_and_has_a_finite_gradient():
    shut = PARAMS | {"key": jnp.zeros_like(PARAMS["key"]), "conv": jnp.zeros_like(PARAMS["conv"])}
    delta, _ = embedded(shut, X, TOKENS)
    rows = [oracle_rows(row.tolist(), NGRAM, CFG.vocab_size, 0) for row in TOKENS]
    e = np.float64(PARAMS["table"])[np.array(rows)].reshape(B, T, -1)
    value = e @ np.float64(PARAMS["value"]).T
    expected = np.broadcast_to(value[:, :, None] / 2, delta.shape)
    np.testing.assert_allclose(delta, expected, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(embed(p, X, TOKENS)[0])))(shut)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_the_table_of_another_layer_is_refused():
    """A second layer's table goes on from the primes of the first, so it has other rows."""
    second = config.ngram_rows(NGRAM, 1)
    assert second != ROWS
    params = PARAMS | {"table": jnp.zeros((second, NGRAM.row_width))}
    message = rf"ngram/table has shape \({second}, 16\), but model\.ngram makes \({ROWS}, 16\)"
    with pytest.raises(ValueError, match=message):
        embed(params, X, TOKENS)
    module = NgramEmbedding(CFG, ordinal=1)
    init = lambda key: module.init(key, X, TOKENS, FLOAT32, None, None)
    made = jax.eval_shape(init, jax.random.key(0))
    assert nn.unbox(made)["params"]["table"].shape == (second, 16)


# Tables on the host. --------------------------------------------------------------------------


@functools.cache
def hosted():
    """The parameters with the table in host memory."""
    return PARAMS | {"table": HostTable(np.asarray(PARAMS["table"]))}


def test_a_host_table_gives_the_same_bits():
    on_host, on_device = embedded(hosted(), X, TOKENS), embedded(PARAMS, X, TOKENS)
    assert jax.tree.all(jax.tree.map(np.array_equal, on_host, on_device))


def test_a_host_table_in_a_decode_loop():
    @jax.jit
    def decode(params, x_BTsD, tokens_BT):
        def step(carry):
            t, state, out = carry
            take = lambda a: jax.lax.dynamic_slice_in_dim(a, t, 1, axis=1)
            delta, state = embed(params, take(x_BTsD), take(tokens_BT), state)
            return t + 1, state, jax.lax.dynamic_update_slice_in_dim(out, delta, t, axis=1)

        start = ngram_embedding.empty(CFG, B)
        carry = jax.lax.while_loop(
            lambda carry: carry[0] < T, step, (0, start, jnp.zeros_like(x_BTsD))
        )
        return carry[2]

    on_host = decode(hosted(), X, TOKENS)
    assert np.array_equal(on_host, decode(PARAMS, X, TOKENS))
    np.testing.assert_allclose(on_host, embedded(PARAMS, X, TOKENS)[0], atol=1e-5)


def test_the_other_parameters_train_as_with_a_table_on_the_device():
    """Under remat in a scan, as the decoder's layers are; the table itself stays as it is."""

    @jax.jit
    @jax.grad
    def gradient(params, x_BTsD):
        body = jax.checkpoint(lambda x, _: (x + embed(params, x, TOKENS)[0], None))
        return jnp.sum(jax.lax.scan(body, x_BTsD, length=2)[0] ** 2)

    on_host, on_device = gradient(hosted(), X), gradient(PARAMS, X)
    assert on_host["table"] is hosted()["table"]
    for name in set(SHAPES) - {"table"}:
        assert jax.tree.all(jax.tree.map(np.array_equal, on_host[name], on_device[name]))


def test_a_host_table_passes_through_trees_and_is_no_constant_of_the_program():
    table = hosted()["table"]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, hosted())
    assert doubled["table"] is jax.jit(lambda p: p)(hosted())["table"] is table
    assert jax.device_put(hosted())["table"] is table
    assert len(jax.tree.leaves(hosted())) == len(jax.tree.leaves(PARAMS)) - 1
    other = PARAMS | {"table": HostTable(table.rows)}
    assert jax.tree.structure(other) != jax.tree.structure(hosted())  # by identity, not value
    program = jax.make_jaxpr(embed)(hosted(), X, TOKENS)
    assert all(np.size(constant) < ROWS for constant in program.consts)
    assert sum(a.size for a in program.in_avals) == sum(
        a.size for a in jax.tree.leaves((hosted(), X, TOKENS))
    )


def test_a_memory_map_in_bfloat16(tmp_path):
    rows = np.asarray(PARAMS["table"]).astype(ml_dtypes.bfloat16)
    mapped = np.memmap(tmp_path / "table", rows.dtype, "w+", shape=rows.shape)
    mapped[:] = rows
    on_host = in_bfloat16(PARAMS | {"table": HostTable(mapped)}, X, TOKENS)
    on_device = in_bfloat16(PARAMS | {"table": jnp.asarray(rows)}, X, TOKENS)
    assert jax.tree.all(jax.tree.map(np.array_equal, on_host, on_device))


def test_each_device_fetches_its_own_share():
    table = HostTable(np.asarray(PARAMS["table"]))
    rows = jnp.asarray(np.random.default_rng(0).integers(0, ROWS, (8, 3, NGRAM.heads)))
    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 4})):
        found = jax.jit(ngram_embedding.look_up)(table, rows)
        assert found.sharding.spec[0] == ("data", "fsdp")
    assert np.array_equal(found, table.rows[np.asarray(rows)])
