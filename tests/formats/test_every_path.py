"""One result on every path: eager, jit, vmap, constants folded by the compiler, eight devices.

Trainer, rollout and cache run the quantizer inside very different programs; a single code that
differs between them is a mismatch that guidance would have to repair.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.formats import edges, oracle
from trace_jax.formats import block_scaled
from trace_jax.formats import quantize as formats

FORMATS = list(block_scaled.FORMATS)
# Sixteen rows of edge cases, wide enough that eight devices can hold whole blocks of each.
ROWS = np.concatenate([edges.EDGES, edges.draw(16, 192), np.zeros((16, 256), np.float32)], axis=1)
FINITE = np.where(np.isfinite(ROWS) & (np.abs(ROWS) < 1e30), ROWS, np.float32(-1.25))
GIVEN = np.exp(np.linspace(-9, 3, 16)).astype(np.float32)
CASES = [
    ("nvfp4", "row"),
    ("nvfp4", "tensor"),
    ("nvfp4", GIVEN),
    ("nvfp4_4over6", "row"),
    ("nvfp4_4over6", "tensor"),
    ("nvfp4_4over6", GIVEN),
    ("mxfp4", "row"),
    ("mxfp4_floor", "row"),
    ("mxfp8", "row"),
]
IDS = [f"{fmt}-{outer if isinstance(outer, str) else 'given'}" for fmt, outer in CASES]


def quantize(x, fmt, outer):
    q = formats.quantize(x, fmt, outer)
    return q, block_scaled.dequantize(q)


jitted = jax.jit(quantize, static_argnums=(1, 2))
jitted_given = jax.jit(quantize, static_argnums=1)


def compiled(x, fmt, outer):
    return (jitted if isinstance(outer, str) else jitted_given)(x, fmt, outer)


def check(result, expected):
    q, values = result
    oracle.assert_same(q, expected)
    oracle.assert_same_bits(values, expected.values)


@pytest.fixture(params=CASES, ids=IDS)
def case(request):
    """(x [16, 512], format, outer, what the oracle makes of them)."""
    fmt, outer = request.param
    x = ROWS if isinstance(outer, str) and outer == "row" else FINITE
    return x, fmt, outer, oracle.quantize(x, fmt, outer)


def test_eager(case):
    x, fmt, outer, expected = case
    check(quantize(jnp.asarray(x), fmt, outer), expected)


def test_jit(case):
    x, fmt, outer, expected = case
    check(compiled(x, fmt, outer), expected)


def test_numpy_arrays_are_welcome(case):
    x, fmt, outer, expected = case
    check(quantize(x, fmt, outer), expected)


def test_vmap_over_rows(case):
    x, fmt, outer, expected = case
    if isinstance(outer, str):
        if outer == "tensor":  # under vmap one scale for each mapped part, here for each row
            expected = oracle.quantize(x, fmt, "row")
        result = jax.jit(jax.vmap(lambda row: quantize(row, fmt, outer)))(x)
    else:
        result = jax.jit(jax.vmap(lambda row, outer: quantize(row, fmt, outer)))(x, outer)
    check(result, expected)


def test_constants_folded_by_the_compiler(case):
    x, fmt, outer, expected = case
    constant = jnp.asarray(x)
    check(jax.jit(lambda: quantize(constant, fmt, outer))(), expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_on_eight_devices(case, axis_type):
    x, fmt, outer, expected = case
    rows = NamedSharding(jax.make_mesh((8,), ("rows",), axis_types=(axis_type,)), P("rows"))
    if not isinstance(outer, str):
        outer = jax.device_put(outer, rows)
    q, values = compiled(jax.device_put(x, rows), fmt, outer)
    check((q, values), expected)
    for leaf in (q.codes, q.scales, values):
        assert leaf.sharding.spec[0] == "rows"


def test_columns_on_eight_devices(case):
    # Whole blocks on every device; the largest magnitude of a row is a reduction over all of them.
    x, fmt, outer, expected = case
    mesh = jax.make_mesh((8,), ("columns",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P(None, "columns")))
    check(compiled(sharded, fmt, outer), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_bfloat16_value_made_in_the_same_program(fmt):
    """The compiler computes bfloat16 in float32 and may skip the rounding; codes must not tell."""
    a, b = (edges.to_bfloat16(edges.draw(64, 512, seed=seed)) for seed in (3, 4))

    @jax.jit
    def layer(a, b):
        x = jax.nn.silu(a) * b
        return x, quantize(x, fmt, "row"), x.astype(jnp.float32)

    x, (q, values), seen = layer(a, b)
    expected = oracle.quantize(np.asarray(x), fmt, "row")
    if fmt == "nvfp4_4over6":
        oracle.assert_same_but_near_ties(q, expected)
    else:
        check((q, values), expected)
    if jax.default_backend() == "cpu":  # that there is something to see: the plain cast is excess
        assert (np.asarray(seen) != np.asarray(x).astype(np.float32)).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_inside_a_scan_under_a_branch_and_with_a_gradient(fmt):
    x = edges.draw(16, 512, seed=5).reshape(4, 4, 512)
    expected = oracle.quantize(x, fmt, "row")

    def body(total, x):
        branch = lambda x: quantize(x, fmt, "row")
        q, values = jax.lax.cond(total >= 0, branch, branch, x)
        return total + jnp.sum(jnp.square(values)), (q, values)

    def loss(x):
        total, result = jax.lax.scan(jax.checkpoint(body), 0.0, x)
        return total, result

    (_, result), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    check(result, expected)
