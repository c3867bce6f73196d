"""The game of the sources: who plays, how a coalition rounds, and what its rows add up to."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import tiny_run
from trace_jax.analysis import attribution, attribution_report, comparison
from trace_jax.analysis.attribution import Game
from trace_jax.guidance import mismatch
from trace_jax.models.layer_context import EngineNoise
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import settings, tasks, warm_up

COMMON = ("routing", "kernels", "staleness")


def resolve(overrides=None):
    return settings.resolve(tiny_run.config(overrides))


def sources(overrides=None):
    return [game.sources for game in attribution.games(resolve(overrides))]


def test_who_plays():
    rounding = ("weights", "activations", "kv cache")
    assert sources() == [rounding + COMMON, ("scales", "codes", *COMMON)]
    truncated = sources({"rollout.top_k": 5})
    assert truncated == [
        (*rounding, *COMMON, "truncation"),
        ("scales", "codes", *COMMON, "truncation"),
    ]
    only_cache = {"quantize": (("attention/[kv]", "nvfp4"),), "guidance.sites": ("*",)}
    assert sources(only_cache)[0] == ("kv cache", *COMMON)


def test_how_a_coalition_rounds():
    tiny = resolve()
    all_sites = tuple(site for site, _ in tiny.quantized.formats)

    def rounding(*on):
        arm = attribution.arm(tiny, frozenset(on))
        formats = tuple(site for site, _ in arm.policy.formats)
        return formats, arm.recording and (arm.recording.encoding, len(arm.recording.sites))

    assert rounding() == (all_sites, ("low1", 5))
    assert rounding("scales") == (all_sites, ("bits", 5))
    assert rounding("codes") == (all_sites, ("scales", 5))
    assert rounding("scales", "codes", "weights", "routing") == (all_sites, None)
    linear = ("attention/in", "attention/out", "experts/in", "experts/mid")
    assert rounding("scales", "codes", "kv cache") == (linear, None)
    assert rounding("scales", "codes", "activations") == (("attention/k", "attention/v"), None)
    everything = attribution.arm(tiny, frozenset(("scales", "codes", "activations", "kv cache")))
    assert everything.policy.formats == ()
    assert set(everything.policy.observed) == set(tiny.quantized.formats)


def test_the_rows_of_a_game_add_up_to_what_happened():
    """a brings 1, b brings 2, both together 4 more, the given one 10 to begin with; twice as much
    at the second prompt."""
    game = Game("BF16", ("a", "b"), frozenset(("given",)))
    amount = {"": 10, "a": 11, "b": 12, "ab": 17}
    values = {
        frozenset(on) | {"given"}: np.array([1.0, 2.0]) * total for on, total in amount.items()
    }
    rows = attribution.play(game, {"gap": values})
    assert [(row["trainer"], row["source"]) for row in rows] == [
        ("BF16", "a"), ("BF16", "b"), ("BF16", "none"), ("BF16", "all")
    ]  # fmt: skip
    assert [row["gap"]["share"] for row in rows] == [1.5 * 3, 1.5 * 4, 1.5 * 10, 1.5 * 17]
    assert [row["gap"].get("alone") for row in rows] == [1.5 * 1, 1.5 * 2, None, None]
    assert [row["gap"].get("last") for row in rows] == [1.5 * 5, 1.5 * 6, None, None]
    assert [row["gap"]["low"] for row in rows] == [3, 4, 10, 17]  # both draws the first prompt
    assert [row["gap"]["high"] for row in rows] == [6, 8, 20, 34]


def test_completions_of_a_prompt_are_one_draw():
    assert attribution.prompt_means(np.array([1, 3, 5, 5, 0, 1]), 2).tolist() == [2, 5, 0.5]


def test_d_act_is_of_all_sites_and_layers_of_a_sequence():
    def site(difference, reference):
        fields = mismatch.Mismatch.__dataclass_fields__
        return mismatch.Mismatch(
            **dict.fromkeys(fields)
            | dict(difference=np.array(difference), reference=np.array(reference))
        )

    sites = {"a": site([[1, 0], [2, 0]], [[4, 1], [4, 1]]), "b": site([[1, 1]], [[8, 2]])}
    seen = attribution.Comparison({}, np.zeros((2, 3)), sites)
    assert attribution.d_act_B(seen).tolist() == [np.sqrt(4 / 16), np.sqrt(1 / 4)]


def test_the_other_engine_runs_the_layers_it_is_given():
    noise = EngineNoise(jax.random.key(0), jnp.full(3, 0.5), jnp.ones(3, bool))
    quieted = attribution.quieted(noise, jnp.arange(3) == 1)
    assert quieted.relative.tolist() == [0, 0.5, 0]
    assert quieted.bfloat16.tolist() == [False, True, False]


@pytest.mark.parametrize(("relative", "name", "bfloat16"), [
    (0.005, "emulated: 0.5% noise", False), (0.0, "measured: BF16 activations", True)
])  # fmt: skip
def test_the_other_engine_is_the_configured_noise_or_that_of_bfloat16(relative, name, bfloat16):
    found, noise = attribution.engine(resolve({"engine_noise": relative}))
    assert found == name
    assert noise.relative.tolist() == [np.float32(relative)] * 2
    assert noise.bfloat16.tolist() == [bfloat16] * 2


def test_truncation_is_all_that_lies_between_a_truncated_rollout_and_an_aligned_trainer(
    tmp_path_factory,
):
    programs = tiny_run.compiled_programs(tmp_path_factory)
    with tiny_run.quick_compiles(programs), tiny_run.one_device():
        tiny = resolve({"rollout.top_p": 0.9})
        with jax.set_mesh(meshes.make_mesh(tiny.mesh)):
            params = warm_up.initial_params(tiny)
            task = tasks.load(tiny.task, tiny.seed)
            rollout = comparison.sample(tiny, task, params, tiny.quantized)
            weights = comparison.weights(params, tiny.quantized, tiny.dtype, True)
            bench = attribution.Bench(
                tiny, tiny.trainer(), rollout, {(False, True): weights}, attribution.engine(tiny)[1]
            )
            aligned, whole = (bench.compare(frozenset(on)) for on in ((), ("truncation",)))
    assert np.abs(aligned.log_ratio_BT).max() < 1e-4
    mass_BT = np.exp(rollout.log_mass_BT)
    assert np.all(mass_BT[np.asarray(rollout.mask_BT) == 1] >= 0.9 - 1e-6)
    np.testing.assert_allclose(np.exp(whole.log_ratio_BT), mass_BT, atol=1e-4)


def results():
    share = {"share": 0.25, "low": 0.125, "high": 0.5}
    source = share | {"alone": 0.0, "last": 0.0625}
    rows = [
        {"trainer": trainer, "source": name, "gap": found, "d_act": found}
        for trainer in ("BF16", "QAT")
        for name, found in (("kernels", source), ("none", share), ("all", share | {"share": 0.5}))
    ]
    engine = {"engine": "emulated", "gap": 0.5, "code_rate": 0.25, "scale_rate": 0, "d_act": 1.5}
    growth = [
        {"method": method, "noisy_layer": layer, "code_rate": [0.0, 0.5], "d_act": [0.0, 0.5]}
        for method in ("qat", "trace, all layers")
        for layer in (0, 1)
    ]
    return {
        "prompts": 2,
        "sequences": 4,
        "engine": "emulated",
        "updates": 2,
        "top_p": 0.9,
        "top_k": 0,
        "sources": rows,
        "engines": [engine],
        "by_site_and_layer": {"attention/in": [0.0, 0.5], "attention/k": [None, 0.25]},
        "by_position": {
            "sequences": [2, 1],
            "gap": {"qat": [0.5, 0.25], "fp4_rollout": [1.0, 0.0]},
        },
        "growth": growth,
    }


def test_the_table():
    lines = attribution_report.markdown(results()).splitlines()
    numbers = " | ".join(2 * ["0.25 | 0.12 .. 0.5 | 50% | 0 | 0.062"])
    assert lines[0] == (
        "4 sequences of 2 prompts; 95%: bootstrap over prompts. kernels: emulated. "
        "staleness: 2 updates. truncation: top_p 0.9, top_k 0."
    )
    assert lines[4] == f"| BF16 | kernels | {numbers} |"
    assert lines[5].startswith("| BF16 | with none of them | 0.25 | 0.12 .. 0.5 | 50% | - | - |")
    assert lines[6].startswith("| BF16 | with all of them | 0.5 | 0.12 .. 0.5 | 100% | - | - |")
    assert lines[-1] == "| emulated | 0.5 | 0.25 | 0 | 1.5 |"


@pytest.mark.filterwarnings("error")
def test_the_figure_is_drawn_from_json_alone():
    drawing = attribution_report.figure(json.loads(json.dumps(results())))
    shares, heat, along, through, _ = drawing.axes
    assert [bar.get_width() for bar in shares.patches] == [50, 50]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["kernels"]
    assert [text.get_text() for text in heat.texts] == ["0", "50", "25"]
    assert [line.get_label() for line in along.lines] == ["qat", "fp4_rollout"]
    assert along.lines[1].get_ydata().tolist() == [1, attribution_report.FLOOR]
    assert [len(line.get_xdata()) for line in through.lines][:4] == [
        2,
        1,
        1,
        1,
    ]  # from the noise on
    drawing.savefig("/dev/null", format="png")
