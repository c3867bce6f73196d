"""The parity-check codes and their decoders: structure, what they must explain and repair."""

import itertools
import zlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.guidance import block_search, min_sum, syndrome

LONG = [(128, 24), (256, 48), (512, 128), (2048, 256), (2048, 384), (4096, 768)]
ALL = [(16, 7), (32, 14), (48, 21), (64, 28), *LONG[:2]]
flips = jax.jit(syndrome.flips)
parities = jax.jit(syndrome.parities, static_argnums=1)


def matrix(n, m):
    """The check matrix H, [m, n], of zeros and ones."""
    checks, _ = (min_sum if n >= syndrome.LONG else block_search).code(n, m)
    H = np.zeros((m, n + 1), int)
    for check, values in enumerate(checks):
        H[check, values] = 1
    return H[:, :n]


# ---- The codes


@pytest.mark.parametrize(("n", "m"), LONG)
def test_in_a_long_row_each_value_is_in_three_checks_of_nearly_equal_size(n, m):
    H = matrix(n, m)
    assert (H.sum(axis=0) == 3).all()
    assert H.sum(axis=1).max() - H.sum(axis=1).min() <= 2
    assert len(np.unique(H, axis=1).T) == n


@pytest.mark.parametrize(("n", "m"), LONG[1:])
def test_where_there_are_checks_enough_no_two_values_share_two(n, m):
    """No cycle of length four: what misleads message passing most."""
    H = matrix(n, m).astype(np.float32)
    shared = H.T @ H
    np.fill_diagonal(shared, 0)
    assert shared.max() == 1


def test_places_point_at_the_value_in_each_of_its_checks():
    for n, m in LONG[:2]:
        checks, places = min_sum.code(n, m)
        assert (checks.reshape(-1)[places] == np.arange(n)[:, None]).all()


def distance(columns):
    """The fewest columns that add up to zero, up to 6."""
    for weight in range(1, 6):
        for chosen in itertools.combinations(columns, weight):
            if not np.bitwise_xor.reduce(chosen):
                return weight
    return 6


@pytest.mark.parametrize(("k", "least"), [(5, 4), (6, 4), (7, 4), (9, 6)])
def test_two_errors_of_a_block_never_look_like_one(k, least):
    columns = block_search.columns(k)
    assert len(set(columns.tolist())) == 16
    assert distance(columns) >= least


def test_with_five_checks_a_block_is_the_extended_hamming_code():
    expected = [word for word in range(32) if word.bit_count() % 2]
    assert sorted(block_search.columns(5)) == expected


def test_blocks_share_no_check_and_what_does_not_go_round_is_unused():
    H = matrix(96, 43)
    for check in range(42):
        assert (np.flatnonzero(H[check]) // 16 == check // 7).all()
    assert not H[42].any()


def test_both_sides_come_to_the_same_code_on_any_machine():
    """Pinned: a record made by one version must not be read with the code of another."""
    crc = lambda checks: zlib.crc32(np.ascontiguousarray(checks, np.int32).tobytes())
    assert crc(min_sum.code(2048, 384)[0]) == 4011964678
    assert crc(block_search.code(64, 28)[0]) == 3134835965


@pytest.mark.parametrize(("n", "m"), ALL)
def test_parities_are_those_of_the_matrix(n, m):
    bits = np.random.default_rng(0).integers(0, 2, (3, 5, n), np.uint8)
    np.testing.assert_array_equal(parities(bits, m), bits @ matrix(n, m).T % 2)


# ---- Decoding


def decoded_alone(n):
    """Slices of a row that are decoded by themselves."""
    size = n if n >= syndrome.LONG else block_search.BLOCK
    return [slice(start, start + size) for start in range(0, n, size)]


@pytest.mark.parametrize(("n", "m"), [(64, 28), (128, 24)])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), errors=st.integers(0, 30))
def test_what_is_flipped_explains_the_parities_or_nothing_is(n, m, seed, errors):
    rng = np.random.default_rng(seed)
    doubt = rng.exponential(1, (8, n)).astype(np.float32)
    wrong = np.zeros((8, n), np.uint8)
    wrong[:, rng.choice(n, errors, replace=False)] = 1
    flipped = np.asarray(flips(doubt, (wrong @ matrix(n, m).T % 2).astype(np.uint8)))
    for part in decoded_alone(n):
        H = matrix(n, m)[:, part]
        explained = ((flipped ^ wrong)[:, part] @ H.T % 2 == 0).all(axis=-1)
        assert (explained | ~flipped[:, part].any(axis=-1)).all()


@pytest.mark.parametrize(("n", "m"), ALL)
def test_the_one_doubtful_value_that_explains_the_parities_is_found(n, m):
    doubt = np.full((n, n), 4, np.float32)  # row i: value i is wrong and in doubt
    np.fill_diagonal(doubt, 0.1)
    differs = matrix(n, m).T.astype(np.uint8)
    np.testing.assert_array_equal(flips(doubt, differs), np.eye(n, dtype=bool))


@pytest.mark.parametrize(("n", "m"), ALL)
def test_with_equal_parities_nothing_is_flipped_however_doubtful(n, m):
    assert not flips(np.zeros((4, n), np.float32), np.zeros((4, m), np.uint8)).any()


def test_of_several_explanations_the_likeliest_is_taken():
    """In the extended Hamming code three columns add up to a fourth; doubts 1, 2, 3, 4."""
    columns = block_search.columns(5).tolist()
    four = [0, 1, 2, columns.index(columns[0] ^ columns[1] ^ columns[2])]
    doubt = np.full((2, 16), 9, np.float32)
    doubt[0, four], doubt[1, four] = [1, 2, 3, 4], [1, 2, 3, 7]
    differs = np.tile(matrix(16, 5)[:, four[3]].astype(np.uint8), (2, 1))
    flipped = np.asarray(flips(doubt, differs))
    assert np.flatnonzero(flipped[0]).tolist() == [four[3]]  # 4 is less than 1 + 2 + 3
    assert np.flatnonzero(flipped[1]).tolist() == [0, 1, 2]  # 6 is less than 7


@pytest.mark.parametrize(("n", "m", "left"), [(64, 28, 0.15), (256, 48, 0.15), (2048, 384, 0)])
def test_errors_among_doubtful_values_are_repaired(n, m, left):
    """1.5% of wrong bits, each at a doubt exponential in 1/4; all others twelve times as sure.

    Of codes with 3 checks for 16 values, the longer is the surer; short ones take 7.
    """
    rng, rows = np.random.default_rng(0), 65536 // n
    wrong = rng.random((rows, n)) < 0.015
    doubt = np.where(wrong, rng.exponential(0.25, (rows, n)), rng.exponential(3, (rows, n)))
    differs = (wrong @ matrix(n, m).T % 2).astype(np.uint8)
    flipped = np.asarray(flips(doubt.astype(np.float32), differs))
    assert (flipped != wrong).sum() <= left * wrong.sum()
