"""Paired timing by a clock that the programs turn themselves; bytes against worked examples."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from trace_jax.analysis import overhead
from trace_jax.guidance import encoding as encodings
from trace_jax.guidance import policy, quantizer, record
from trace_jax.models import architecture, config, decoder


class Clock:
    """Time passes when a program runs: `drift` slows all of them down as a busy machine does."""

    def __init__(self, monkeypatch, drift=0.0):
        self.now, self.drift, self.order = 0.0, drift, ""
        monkeypatch.setattr(overhead, "CLOCKS", {"cpu": self.read, "wall": lambda: 3 * self.now})

    def read(self):
        return self.now

    def program(self, name, seconds):
        def run():
            self.order += name
            self.now += seconds * (1 + self.drift * len(self.order))

        return run


def test_a_program_twice_as_slow_has_ratio_two_by_each_clock(monkeypatch):
    clock = Clock(monkeypatch)
    base, slow = clock.program("a", 0.25), clock.program("b", 0.5)
    paired = overhead.measure(base, {"slow": slow}, pairs=5)["slow"]
    assert paired.ratio("cpu") == paired.ratio("wall") == {"median": 2, "min": 2, "max": 2}
    np.testing.assert_array_equal(paired.base["cpu"], [0.25] * 5)
    assert json.loads(json.dumps(paired.summary()))["wall"]["other_s"] == [1.5] * 5


def test_the_sides_of_a_pair_are_neighbours_in_turned_order(monkeypatch):
    clock = Clock(monkeypatch)
    others = {"b": clock.program("b", 1), "c": clock.program("c", 1)}
    overhead.measure(clock.program("a", 1), others, pairs=3)
    compile_and_size = "aabbcca"
    assert clock.order == compile_and_size + "abac" + "baca" + "abac"


def test_a_short_program_is_called_until_the_run_is_long_enough(monkeypatch):
    clock = Clock(monkeypatch)
    short, other = clock.program("a", overhead.SHORTEST / 4), clock.program("b", 1)
    overhead.measure(short, {"b": other}, pairs=1)
    assert clock.order.endswith("aaaabbbb")


def test_a_machine_that_slows_down_leaves_the_median_ratio_near_one(monkeypatch):
    clock = Clock(monkeypatch, drift=0.01)
    paired = overhead.measure(clock.program("a", 1), {"b": clock.program("b", 1)}, pairs=10)["b"]
    assert paired.base["cpu"][-1] > 1.1 * paired.base["cpu"][0]
    assert paired.ratio("cpu")["median"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("fmt", "encoding"),
    [
        *itertools.product(["nvfp4", "mxfp4"], encodings.ENCODINGS),
        *itertools.product(["nvfp4_4over6", "mxfp4_w4a8"], ["codes", "low1", "low2"]),
    ],
)
def test_every_site_holds_the_bytes_of_the_formula(encoding, fmt):
    cfg = small_model.CFG
    quantized = policy.resolve([("*", fmt)], architecture.sites(cfg))
    recording = record.recording(encoding, ("*",), "all", architecture.site_layers(cfg), quantized)

    def forward(key):
        tokens = jnp.zeros((3, 5), jnp.int32)
        return decoder.forward(
            decoder.init(cfg, key), tokens, cfg, policy=quantized, records=(recording,)
        )

    (guidance,) = jax.eval_shape(forward, jax.random.key(0)).recorded
    by_site = overhead.site_bytes(guidance, cfg)
    assert set(by_site) == set(quantized.sites)
    for site, of in by_site.items():
        assert of["held"] == of["formula"], site
    total = cfg.num_layers * sum(of["held"] for of in by_site.values())
    assert total == record.bytes_per_token(guidance)


def test_the_paper_s_model_needs_384_bytes_a_site_and_4_for_the_outer_scale():
    """method.md 1.11: 2048 wide, one bit a value and one byte a block of 16."""
    guide = jax.eval_shape(
        lambda x: quantizer.encode(quantizer.round_value(x, "nvfp4", "row", None), "low1"),
        jax.ShapeDtypeStruct((1, 1, 1, 2048), jnp.float32),
    )
    guidance = record.Guidance({"experts/in": guide}, (("experts/in", (0,)),))
    cfg = config.get("qwen3_30b_a3b")
    assert overhead.site_bytes(guidance, cfg) == {"experts/in": {"held": 388, "formula": 388}}


def test_a_record_of_other_widths_than_the_model_s_is_named():
    guide = quantizer.Guide(
        jnp.zeros((1, 1, 1, 4), jnp.uint8), jnp.zeros((1, 1, 1, 2), jnp.float8_e4m3fn),
        jnp.zeros((1, 1, 1)), "nvfp4", "low1",
    )  # fmt: skip
    with pytest.raises(ValueError, match="experts/in takes 10 bytes, not 388"):
        overhead.site_bytes(
            record.Guidance({"experts/in": guide}, (("experts/in", (0,)),)),
            config.get("qwen3_30b_a3b"),
        )


def test_tables_show_medians_spread_and_targets():
    seconds = lambda *s: {"cpu": np.array(s), "wall": np.array(s)}
    paired = overhead.Paired(seconds(1.0, 1.0, 1.0), seconds(1.0, 1.25, 1.125))
    row = overhead.time_table({"x": paired}, {"x": 1.06}).splitlines()[-1]
    spread = "1.125 (1.000..1.250)"
    assert row == f"| x | 1000.0 | 1125.0 | {spread} | {spread} | 1.06 |"
    row = overhead.bytes_table({"low1": {"k": {"held": 14, "formula": 14.0}}}).splitlines()[-1]
    assert row == "| low1 | k | 14 | 14 |"
