"""The policy: rules in order, patterns, formats, and what is said of a rule that means nothing."""

import pytest

from trace_jax.formats.block_scaled import FORMATS
from trace_jax.guidance import policy
from trace_jax.guidance.policy import SITES, Policy

QWEN3 = tuple(site for site in SITES if site.startswith(("attention/", "experts/", "head/")))


def resolve(rules, among=QWEN3):
    return policy.resolve(rules, among)


def test_the_first_rule_that_matches_decides():
    rules = [("attention/k", "mxfp4"), ("attention/*", "bf16"), ("*", "nvfp4")]
    resolved = resolve(rules)
    assert resolved.formats == (
        ("attention/k", "mxfp4"), ("experts/in", "nvfp4"), ("experts/mid", "nvfp4"),
    )  # fmt: skip
    everything = tuple((site, "nvfp4") for site in QWEN3 if site != "head/in")
    assert resolve(reversed(rules)).formats == everything


def test_sites_come_in_one_order_however_they_were_named():
    resolved = resolve([("experts/*", "nvfp4"), ("attention/[vk]", "nvfp4")])
    assert resolved.sites == ("attention/k", "attention/v", "experts/in", "experts/mid")
    again = resolve([("attention/v", "nvfp4"), ("attention/k", "nvfp4"), ("exp*", "nvfp4")])
    assert resolved == again
    assert hash(resolved) == hash(again)


def test_a_weight_has_the_format_of_the_input_it_multiplies():
    resolved = resolve([("experts/in", "nvfp4"), ("attention/out", "mxfp4")])
    assert resolved.weight_fmt("experts/gate_up") == "nvfp4"
    assert resolved.weight_fmt("attention/o") == "mxfp4"
    assert resolved.fmt("experts/in") == "nvfp4"
    for outside in (
        "experts/down",
        "attention/q",
        "experts/router",
        "embed",
        "head",
        "attention/scale",
    ):
        assert resolved.weight_fmt(outside) is None
    assert resolved.fmt("experts/mid") is None


def test_one_rule_names_w4a8():
    """MXFP4 weights, K, V and state; MXFP8 activations, where weights multiply them."""
    resolved = resolve([("head/in", "bf16"), ("*", "mxfp4_w4a8")])
    assert resolved.formats == (
        ("attention/in", "mxfp8"), ("attention/k", "mxfp4"), ("attention/v", "mxfp4"),
        ("attention/out", "mxfp8"), ("experts/in", "mxfp8"), ("experts/mid", "mxfp8"),
    )  # fmt: skip
    with_weights = ("attention/in", "attention/out", "experts/in", "experts/mid")
    assert resolved.weights == tuple((site, "mxfp4") for site in with_weights)
    assert resolved.weight_fmt("experts/down") == "mxfp4"
    assert resolve([("head/in", "mxfp4_w4a8")]).weight_fmt("head") == "mxfp4"
    state = resolve([("delta_net/state", "mxfp4_w4a8")], SITES)
    assert (state.fmt("delta_net/state"), state.weights) == ("mxfp4", ())
    mixed = resolve([("experts/in", "mxfp4_w4a8"), ("experts/mid", "mxfp8")])
    assert mixed.formats == (("experts/in", "mxfp8"), ("experts/mid", "mxfp8"))
    assert mixed.weights == (("experts/in", "mxfp4"), ("experts/mid", "mxfp8"))


def test_every_name_of_a_pair_names_formats():
    assert not set(policy.PAIRS) & set(FORMATS)
    assert all(set(pair) <= set(FORMATS) for pair in policy.PAIRS.values())


def test_nothing_is_quantized_by_default():
    assert resolve([]) == Policy() == policy.NOTHING
    assert resolve([("*", "bf16")]) == policy.NOTHING
    assert policy.NOTHING.sites == ()


def test_observed_sites_have_codes_and_no_format():
    observing = Policy(formats=(("experts/in", "nvfp4"),), observed=(("attention/k", "nvfp4"),))
    assert set(observing.sites) == {"experts/in", "attention/k"}
    assert observing.fmt("attention/k") is None
    assert observing.weight_fmt("attention/q") is None


def test_weights_and_activations_can_be_told_apart():
    resolved = resolve([("experts/in", "nvfp4"), ("attention/k", "mxfp4")])
    weights = resolved.only(weights=True, sites=())
    assert weights.weight_fmt("experts/gate_up") == "nvfp4"
    assert weights.formats == ()
    assert weights.observed == resolved.formats
    keys = resolved.only(weights=False, sites=["attention/k"])
    assert keys == Policy((("attention/k", "mxfp4"),), (), (("experts/in", "nvfp4"),))
    assert resolved.only(weights=True, sites=resolved.sites) == resolved


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
        f"attention/out, experts/in, experts/mid, head/in; closest: '{closest}'"
    )
    with pytest.raises(ValueError) as raised:
        resolve([("*", "nvfp4"), (pattern, "bf16")])
    assert str(raised.value) == message


def test_unknown_format():
    with pytest.raises(
        ValueError, match=r"unknown format 'nvfp8'.*'mxfp4', .*'mxfp4_w4a8'.*'nvfp4'"
    ):
        resolve([("*", "nvfp8")])


def test_some_sites_are_quantized_only_where_they_are_named_in_full():
    everything = resolve([("*", "nvfp4")], SITES)
    assert set(SITES) - set(everything.sites) == set(policy.BY_NAME)
    assert resolve([("head/in", "nvfp4")], SITES).weight_fmt("head") == "nvfp4"
    state = resolve([("delta_net/state", "nvfp4")], SITES)
    assert state.fmt("delta_net/state") == "nvfp4"
    assert state.sites == ()  # nothing of it can be recorded
    with pytest.raises(ValueError, match=r"'delta_net/s\*' matches nothing"):
        resolve([("delta_net/s*", "nvfp4")], SITES)


def test_a_site_that_the_model_lacks_matches_nothing():
    with pytest.raises(ValueError, match=r"'delta_net/\*' matches nothing; sites: attention/in"):
        resolve([("delta_net/*", "nvfp4")])
