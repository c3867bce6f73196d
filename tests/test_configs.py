"""Shipped configurations: pinned in full, and all of them resolve.

A change of a default changes every experiment, so it has to be seen. After a change that is meant:

    python -m tests.test_configs
"""

import importlib
import json
import pathlib

import pytest

from trace_jax.models import config as models
from trace_jax.rl import methods, settings

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/golden/configs"
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def shipped(name):
    return importlib.import_module(f"configs.{name}").get_config()


def as_json(name):
    return json.dumps(json.loads(shipped(name).to_json()), indent=2) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_is_the_one_that_was_reviewed(name):
    golden = (GOLDEN / f"{name}.json").read_text()
    assert as_json(name) == golden, "if meant: python -m tests.test_configs, and commit"


def test_every_golden_config_is_shipped():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == NAMES


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_resolves_under_every_method(name, method):
    config = shipped(name)
    config.method = method
    settings.resolve(config)


@pytest.mark.parametrize("model", models.MODELS)
def test_the_default_takes_the_sizes_of_a_named_model(model):
    config = importlib.import_module("configs.tiny_cpu").get_config(model)
    assert settings.resolve(config).cfg == models.get(model)


def test_the_papers_own_sites_need_no_other_change():
    """As README.md names them: experts, K and V, latter half of the layers."""
    config = shipped("tiny_cpu")
    config.quantize = (("experts/*", "nvfp4"), ("attention/[kv]", "nvfp4"))
    config.guidance.layers = "latter_half"
    recording = settings.resolve(config).recording
    assert recording.layers == (("attention/k", (1,)), ("attention/v", (1,)), ("experts/in", (1,)))


def test_a_config_refuses_what_it_does_not_have():
    config = shipped("tiny_cpu")
    with pytest.raises(AttributeError, match="learning_rate"):
        config.rl.learning_rte = 1e-3
    with pytest.raises(TypeError):
        config.rollout.prompts = 2.5  # an int; the other way round is converted
    config.rl.learning_rate = 1
    assert isinstance(config.rl.learning_rate, float)


if __name__ == "__main__":
    for each in NAMES:
        (GOLDEN / f"{each}.json").write_text(as_json(each))
