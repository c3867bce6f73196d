"""The cost model against a model small enough to count by hand, and known totals."""

import dataclasses

import pytest

from trace_jax.analysis import cost_model
from trace_jax.analysis.cost_model import Chip
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING, resolve
from trace_jax.models import architecture, config

SMALL = config.ModelConfig(
    vocab_size=10, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, num_experts_per_token=2, moe_intermediate_size=16,
)  # fmt: skip
POLICY = resolve([("*", "nvfp4")], architecture.sites(SMALL))
CHIP = Chip(memory=1e6, bandwidth=1e6, bf16=1e6, link=1e6, fp4=4e6)
BF16 = cost_model.sizes(NOTHING, SMALL)


def test_bytes_of_a_bf16_step_by_hand():
    # attention 6144 and head 320 in BF16; norms 224 and router 256 in float32
    assert BF16.dense_bytes == 2 * (6144 + 320) + 4 * (224 + 256)
    assert BF16.routed_bytes == 2 * 12288
    assert BF16.weight_bytes == BF16.dense_bytes + BF16.routed_bytes + 2 * 320
    assert cost_model.step_bytes(BF16, batch=2, attended=5) == {
        "dense weights": 14848 + 2 * 64,
        "experts": 24576 * 0.75,  # two tokens miss an expert with (1 - 2/4)^2
        "kv": 2 * 5 * 128,
        "state": 0,
        "guidance": 0,
    }


def test_flops_by_hand_and_fp4_units_only_where_both_operands_are():
    fp4 = cost_model.sizes(POLICY, SMALL)
    assert (BF16.flops_fp4, BF16.flops_per_position) == (0, 2 * 2 * 2 * 2 * 16)
    assert BF16.flops_bf16 == 2 * (6144 + 6144 + 256 + 320)
    assert (fp4.flops_fp4, fp4.flops_bf16) == (2 * (6144 + 6144), 2 * (256 + 320))
    compute = lambda on: cost_model.step_seconds(fp4, on, 1, 3, 5)["compute"]
    assert compute(CHIP) == pytest.approx(3 * (1152 + 5 * 256 + 24576 / 4) / 1e6)
    without = dataclasses.replace(CHIP, fp4=None)
    assert compute(without) == pytest.approx(3 * (1152 + 5 * 256 + 24576) / 1e6)


def test_the_slowest_floor_decides_and_chips_share_it():
    seconds = cost_model.step_seconds(BF16, CHIP, 2, 2, 5)
    assert seconds["memory"] == pytest.approx((14976 + 18432 + 1280) / 2e6)
    assert seconds["link"] == pytest.approx(2 * (2 * 2 * 2 * 2 * 32) * 0.5 / 2e6)
    fast = dataclasses.replace(CHIP, bf16=1e12, link=1e12)
    # memory-bound, linear in length: the average is that of the middle, 3 + 4 / 2
    assert cost_model.tokens_per_second(BF16, fast, 2, 2, prompt=3, length=4) == pytest.approx(
        2 / seconds["memory"]
    )


def test_largest_batch_and_length_just_fit():
    per_sequence = 100 * 128
    room = 0.9e6 - BF16.weight_bytes
    batch = cost_model.largest_batch(BF16, CHIP, 1, length=100)
    assert batch == room // per_sequence
    length = cost_model.largest_length(BF16, CHIP, 1, batch)
    assert BF16.held(batch, length) <= 0.9e6 < BF16.held(batch, length + 1)
    tiny = dataclasses.replace(CHIP, memory=1e4)
    assert cost_model.largest_batch(BF16, tiny, 1, 1) == 0
    (row,) = cost_model.speed_up(SMALL, POLICY, None, tiny, 1, 2, 1, lengths=(4,))
    assert row["largest"] is None


def test_known_totals_of_qwen3_5_35b_a3b():
    cfg = config.get("qwen3_5_35b_a3b")
    policy = resolve([("*", "nvfp4")], architecture.sites(cfg))
    recording = record.recording(
        "low1", ("*",), "latter_half", architecture.site_layers(cfg), policy
    )
    bf16, fp4 = cost_model.sizes(NOTHING, cfg), cost_model.sizes(policy, cfg, recording)
    assert bf16.kv_bytes == 10 * 2048
    # 2 heads x K and V x 256: codes, a scale for 16, and a float32 outer scale a row
    assert fp4.kv_bytes == 10 * (2 * 2 * (128 + 16 + 4))
    assert fp4.guidance_bytes > 40 * 8
    assert 3.4 < bf16.routed_bytes / fp4.routed_bytes < 3.6


def test_an_unknown_chip_names_the_choices():
    with pytest.raises(ValueError, match=r"'v9'.*h100"):
        cost_model.chip("v9")
