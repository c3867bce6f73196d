"""Plans: a topology is read exactly, and the numbers of a plan belong together."""

import pytest

from experiments import plan


@pytest.mark.parametrize(
    ("text", "chips"),
    [("v5p:2x4x4", ("v5p", 32)), ("h100:1x8", ("h100", 8)), ("v5e:1", ("v5e", 1))],
)
def test_a_topology_is_a_chip_and_a_grid(text, chips):
    assert plan.parse_topology(text) == chips


@pytest.mark.parametrize("text", ["v5p", "v5p:", "v5p:2x", "v5p:0x2", "v5p:axb", "a100:1x8", ""])
def test_another_topology_is_refused(text):
    with pytest.raises(ValueError, match=r"topology=|is unknown"):
        plan.parse_topology(text)


def test_a_plan_of_the_35b():
    one = plan.plan("qwen3_5_35b_a3b", "v5p:2x4x4", batch=64, prompt=1024)
    assert one["bf16"]["kv_bytes_per_token"] == 10 * 2048  # ten layers of full attention
    assert one["fp4"]["kv_bytes_per_token"] == 10 * 592  # 4 rows of 128 + 16 + 4 bytes
    assert one["fp4"]["guidance_bytes_per_token"] == 8800 + 40 * 8  # low bit of 20 layers, routes
    assert one["fp4"]["largest_length"] > one["bf16"]["largest_length"]
    same = [row["same"] for row in one["speed_up"]]
    assert same == sorted(same)  # the longer the cache, the more FP4 saves
    assert 1 < same[0] < same[-1] < 3.56
    text = plan.table([one])
    assert len({line.count("|") for line in text.splitlines()}) == 1
