"""BlockScaled is like an array: jit, scan, slices, shardings, checkpoints. Operands are exact."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.formats import edges, oracle
from trace_jax.formats import block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import quantizer

FORMATS = list(block_scaled.FORMATS)
X = edges.draw(8 * 3 * 2, 64).reshape(8, 3, 2, 64)
dequantize = jax.jit(block_scaled.dequantize)
operand = jax.jit(block_scaled.operand, static_argnums=1)
quantize = jax.jit(formats.quantize, static_argnums=(1, 2))
quantize_matrices = jax.jit(formats.quantize_matrices, static_argnums=1)


@pytest.fixture(scope="module", params=FORMATS)
def weights(request):
    """[8, 3, 2, 64] with one outer scale for each of 8 x 3 matrices."""
    return quantize_matrices(X, request.param)


def assert_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(
            np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8)
        )


def test_shape_and_leaves(weights):
    block, _, outer, element = block_scaled.FORMATS[weights.fmt]
    assert weights.shape == X.shape
    assert weights.codes.shape == (8, 3, 2, 8 * element.BITS)
    assert weights.scales.shape == (8, 3, 2, 64 // block)
    assert len(jax.tree.leaves(weights)) == 2 + outer
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
    assert names == [".codes", ".scales", ".outer"][: len(names)]


def test_an_argument_and_a_result_of_jit(weights):
    assert_identical(jax.jit(lambda q: q)(weights), weights)
    oracle.assert_same_bits(dequantize(weights), oracle.read(weights).values)


def test_scan_over_the_leading_axis(weights):
    def layer(carry, q):
        assert q.shape == X.shape[1:]
        return carry + 1, (q, block_scaled.dequantize(q))

    count, (same, values) = jax.jit(lambda q: jax.lax.scan(layer, 0, q))(weights)
    assert count == 8
    assert_identical(same, weights)
    oracle.assert_same_bits(values, dequantize(weights))


def test_vmap_and_tree_operations(weights):
    oracle.assert_same_bits(
        jax.vmap(jax.vmap(block_scaled.dequantize))(weights), dequantize(weights)
    )
    halves = [jax.tree.map(lambda leaf: leaf[:4], weights), weights[4:]]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *halves)
    assert_identical(joined, weights)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(2, 5),
        (slice(None), 1),
        (3, slice(0, 2)),
        (1, 2, 0),
        (slice(None), slice(None), slice(0, 1)),
        np.array([5, 0, 5]),
        (np.array([5, 0]), np.array([1, 2])),
        (np.int32(4),),
    ],
    ids=str,
)
@pytest.mark.parametrize("outer", ["tensor", "row", "matrix"])
def test_a_slice_stands_for_the_slice_of_the_values(index, outer):
    q = quantize_matrices(X, "nvfp4") if outer == "matrix" else quantize(X, "nvfp4", outer)
    oracle.assert_same_bits(oracle.read(q[index]).values, oracle.read(q).values[index])
    q = quantize_matrices(X, "mxfp4")
    oracle.assert_same_bits(oracle.read(q[index]).values, oracle.read(q).values[index])


def test_a_slice_by_a_traced_index(weights):
    picked = jax.jit(lambda q, i: q[i])(weights, jnp.int32(3))
    assert_identical(picked, weights[3])


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., 0), ..., None, (0, None)], ids=str)
def test_a_slice_that_could_cut_the_blocked_axis_is_an_error(index):
    with pytest.raises(IndexError, match=r"\(8, 3, 2, 64\).*last axis"):
        quantize_matrices(X, "nvfp4")[index]


def test_leading_axes_on_devices(weights):
    mesh = jax.make_mesh((4, 2), ("layer", "row"), axis_types=(AxisType.Auto,) * 2)
    layers = jax.device_put(weights, NamedSharding(mesh, P("layer")))
    for leaf in jax.tree.leaves(layers):
        assert leaf.addressable_shards[0].data.shape[0] == 2
    assert_identical(layers, weights)
    oracle.assert_same_bits(dequantize(layers), dequantize(weights))
    # Rows and whole blocks as well, each leaf by its own rank.
    spec = BlockScaled(
        P("layer", None, "row"),
        P("layer", None, "row"),
        None if weights.outer is None else P("layer"),
        weights.fmt,
    )
    both = jax.device_put(weights, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))
    assert both.codes.addressable_shards[0].data.shape == (2, 3, 1, weights.codes.shape[-1])
    oracle.assert_same_bits(dequantize(both), dequantize(weights))


@pytest.mark.parametrize("checkpointer", ["standard", "pytree"])
def test_a_checkpoint_comes_back_bit_for_bit(weights, checkpointer, tmp_path):
    guide = quantizer.encode(quantize(edges.EDGES, weights.fmt), "low1")  # with NaN scales
    saved = {"weights": weights, "guide": guide}
    like = jax.eval_shape(lambda: saved)
    if checkpointer == "standard":
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "step", saved)
            writer.wait_until_finished()
            restored = writer.restore(tmp_path / "step", like)
    else:
        with ocp.PyTreeCheckpointer() as writer:
            writer.save(tmp_path / "step", saved)
            restored = writer.restore(
                tmp_path / "step",
                item=saved,
                restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            )
    assert isinstance(restored["weights"], BlockScaled)
    assert_identical(restored, saved)


class TestOperand:
    def test_every_code_at_every_scale_is_exact_in_bfloat16(self):
        codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
        scales = oracle.E4M3.astype(ml_dtypes.float8_e4m3fn)[:, None]
        q = block_scaled.pack(jnp.asarray(codes), jnp.asarray(scales), jnp.float32(0.3), "nvfp4")
        exact = oracle.CODE_VALUES.astype(np.float64) * oracle.E4M3.astype(np.float64)[:, None]
        for dtype in (jnp.bfloat16, jnp.float32):
            values, outer, _ = operand(q, dtype)
            assert values.dtype == dtype
            np.testing.assert_array_equal(np.asarray(values).astype(np.float64), exact)
            assert outer == np.float32(0.3)
        assert (np.abs(exact[exact != 0]).min(), exact.max()) == (2.0**-10, 2688)

    @pytest.mark.parametrize("fmt", ["mxfp4", "mxfp4_floor"])
    def test_every_code_at_every_power_of_two_is_exact_in_bfloat16(self, fmt):
        # Scales whose products with 0.5 and 6 are normal numbers of float32.
        bytes_ = np.arange(2, 252, dtype=np.uint8)[:, None]
        codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (len(bytes_), 1))
        scales = jax.lax.bitcast_convert_type(jnp.asarray(bytes_), jnp.float8_e8m0fnu)
        q = block_scaled.pack(jnp.asarray(codes), scales, None, fmt)
        exact = oracle.CODE_VALUES[codes] * 2.0 ** (bytes_.astype(np.float64) - 127)
        values, outer, _ = operand(q, jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(values).astype(np.float64), exact)
        assert outer is None

    def test_every_e4m3_code_at_every_power_of_two_is_exact_in_bfloat16(self):
        # Scales whose products with 2^-9 and 448 are normal numbers of float32.
        bytes_ = np.arange(10, 246, dtype=np.uint8)[:, None]
        codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
        codes = np.tile(np.append(codes, [0, 0]), (len(bytes_), 1))
        scales = jax.lax.bitcast_convert_type(jnp.asarray(bytes_.repeat(8, 1)), jnp.float8_e8m0fnu)
        q = block_scaled.pack(jnp.asarray(codes), scales, None, "mxfp8")
        exact = oracle.CODE_VALUES_8[codes] * 2.0 ** (bytes_.astype(np.float64) - 127)
        values, outer, _ = operand(q, jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(values).astype(np.float64), exact)
        assert outer is None

    def test_values_times_outer_are_the_dequantized_values(self, weights):
        values, outer, _ = operand(weights, jnp.bfloat16)
        values = np.asarray(values, np.float64)
        if outer is not None:
            values = values * np.asarray(outer, np.float64)[..., None, None]
        np.testing.assert_allclose(values, dequantize(weights), rtol=2.0**-23)

    def test_a_product_of_operands_is_the_product_of_the_values(self):
        x, w = edges.draw(5, 64, seed=1), edges.draw(7, 64, seed=2)
        qx, qw = quantize(x, "nvfp4", "row"), quantize(w, "nvfp4", "tensor")

        @jax.jit
        def product_of(qx, qw):
            a, b = (block_scaled.operand(q, jnp.bfloat16) for q in (qx, qw))
            y = jnp.einsum("nd,fd->nf", a.values, b.values, preferred_element_type=jnp.float32)
            return y * a.outer[:, None] * b.outer

        product = product_of(qx, qw)
        exact = oracle.read(qx).values.astype(np.float64) @ oracle.read(qw).values.T
        np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001], ids=hex)
def test_the_largest_magnitude_is_nan_wherever_the_nan_is(bits):
    """XLA's own maximum drops it from arrays of this size on CPU, with either sign."""
    x = edges.draw(512, 512)
    x[np.arange(512), np.arange(512)] = np.uint32(bits).view(np.float32)
    x[0, 0] = np.inf
    largest = jax.jit(block_scaled.largest_magnitude)(x)
    assert largest[0] == np.inf
    assert np.isnan(largest[1:]).all()
    assert np.isnan(block_scaled.largest_magnitude(x, axis=None))
    finite = -np.abs(edges.draw(3, 64))
    np.testing.assert_array_equal(
        block_scaled.largest_magnitude(finite), np.abs(finite).max(axis=-1)
    )
