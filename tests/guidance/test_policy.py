"""The policy: rules in order, patterns, formats, and what is said of a rule that means nothing."""

import pytest

from trace_jax.guidance import policy
from trace_jax.guidance.policy import SITES, Policy


def test_the_first_rule_that_matches_decides():
    rules = [("attention/k", "mxfp4"), ("attention/*", "bf16"), ("*", "nvfp4")]
    resolved = policy.resolve(rules)
    assert resolved.formats == (
        ("attention/k", "mxfp4"), ("experts/in", "nvfp4"), ("experts/mid", "nvfp4"),
    )  # fmt: skip
    assert policy.resolve(reversed(rules)).formats == tuple((site, "nvfp4") for site in SITES)


def test_sites_come_in_one_order_however_they_were_named():
    resolved = policy.resolve([("experts/*", "nvfp4"), ("attention/[vk]", "nvfp4")])
    assert resolved.sites == ("attention/k", "attention/v", "experts/in", "experts/mid")
    again = policy.resolve([("attention/v", "nvfp4"), ("attention/k", "nvfp4"), ("exp*", "nvfp4")])
    assert resolved == again
    assert hash(resolved) == hash(again)


def test_a_weight_has_the_format_of_the_input_it_multiplies():
    resolved = policy.resolve([("experts/in", "nvfp4"), ("attention/out", "mxfp4")])
    assert resolved.weight_fmt("gate_up") == "nvfp4"
    assert resolved.weight_fmt("o") == "mxfp4"
    assert resolved.fmt("experts/in") == "nvfp4"
    for outside in ("down", "q", "router", "embed", "head", "scale"):
        assert resolved.weight_fmt(outside) is None
    assert resolved.fmt("experts/mid") is None


def test_nothing_is_quantized_by_default():
    assert policy.resolve([]) == Policy() == policy.NOTHING
    assert policy.resolve([("*", "bf16")]) == policy.NOTHING
    assert policy.NOTHING.sites == ()


def test_observed_sites_have_codes_and_no_format():
    observing = Policy(formats=(("experts/in", "nvfp4"),), observed=(("attention/k", "nvfp4"),))
    assert set(observing.sites) == {"experts/in", "attention/k"}
    assert observing.fmt("attention/k") is None
    assert observing.weight_fmt("q") is None


@pytest.mark.parametrize(
    ("pattern", "closest"),
    [
        ("expert/in", "experts/in"),
        ("attention/outer", "attention/out"),
        ("attn/out", "attention/out"),
        ("experts/down", "experts/in"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named_with_its_closest_site(pattern, closest):
    message = (
        f"site pattern '{pattern}' matches nothing; sites: attention/in, attention/k, attention/v, "
        f"attention/out, experts/in, experts/mid; closest: '{closest}'"
    )
    with pytest.raises(ValueError) as raised:
        policy.resolve([("*", "nvfp4"), (pattern, "bf16")])
    assert str(raised.value) == message


def test_unknown_format():
    with pytest.raises(ValueError, match=r"unknown FP4 format 'nvfp8'.*'mxfp4'.*'nvfp4'"):
        policy.resolve([("*", "nvfp8")])
