"""The command that moves checkpoints: imports, exports of imports and of runs, bad input."""

import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from experiments import checkpoint
from tests.models.hugging_face import small_checkpoints
from tests.rl import tiny_run
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.models import checkpoint_hf, packing
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import warm_up
from trace_jax.rl.settings import resolve
from trace_jax.training import state as train_state
from trace_jax.training.checkpoint import Checkpoints


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with tiny_run.quick_compiles(tiny_run.compiled_programs(tmp_path_factory)):
        yield


BF16 = np.dtype(ml_dtypes.bfloat16)


def command(name, **flags):
    """experiments.checkpoint with flags; `source` is --from."""
    if "source" in flags:
        flags["from"] = flags.pop("source")
    absl_flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**{flag: str(value) for flag, value in flags.items()}):
        checkpoint.main(["checkpoint", name] if name else ["checkpoint"])


def test_there_and_back(tmp_path):
    source = small_checkpoints.directory(tmp_path, "qwen3_5_nested")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(f'"{name}"')
    command("import", source=source, workdir=tmp_path / "work")
    assert (tmp_path / "work/chat_template.jinja").read_text() == '"chat_template.jinja"'
    command("export", workdir=tmp_path / "work", to=tmp_path / "out", shard_gb=1e-4)
    small_checkpoints.assert_same(
        small_checkpoints.read(tmp_path / "out"), small_checkpoints.read(source)
    )
    assert (tmp_path / "out/tokenizer.json").read_text() == '"tokenizer.json"'
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    command(
        "export", workdir=tmp_path / "work", to=tmp_path / "packed", format="nvfp4",
        style="compressed-tensors", quantize="experts/mid,shared_expert/*",
    )  # fmt: skip
    packed = {n for n in small_checkpoints.read(tmp_path / "packed") if n.endswith("weight_packed")}
    assert {name.split(".")[-2] for name in packed if ".experts." in name} == {"down_proj"}
    assert {name.split(".")[-2] for name in packed if ".shared_expert." in name} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    command("import", source=tmp_path / "packed", workdir=tmp_path / "arrays", dequantize=True)
    params, _ = checkpoint_hf.load_imported(tmp_path / "arrays")
    assert params["layers_0"]["0"]["experts"]["down"].dtype == np.float32


def made_run(workdir):
    """(run directory, its newest masters, its settings), nothing trained."""
    config = tiny_run.config()
    settings = resolve(config)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh({}, jax.devices()[:1])):
        directory.write_config(config.to_dict())
        store, masters = Checkpoints(directory.checkpoints), warm_up.initial_params(settings)
        for step in (1, 3):
            masters = jax.tree.map(lambda leaf: leaf + 0.01, masters)
            state = train_state.create(masters, settings.trainer().transformation)
            store.save(step, state, jax.random.key(0), [])
        store.close()
    return workdir, masters, settings


def test_the_newest_parameters_of_a_run(tmp_path):
    run, masters, settings = made_run(tmp_path / "run")
    command("export", workdir=run, to=tmp_path / "bf16")
    command("export", workdir=run, to=tmp_path / "nvfp4", format="nvfp4")
    found, cfg = checkpoint_hf.load(tmp_path / "bf16")
    assert cfg == settings.cfg
    for mine, master in zip(jax.tree.leaves(found), jax.tree.leaves(masters), strict=True):
        assert np.array_equal(mine, np.asarray(master).astype(BF16))
    packed, _ = checkpoint_hf.load(tmp_path / "nvfp4")
    rollout = packing.pack_jit(masters, settings.quantized, settings.dtype)
    experts = lambda params: params["layers_0"]["0"]["experts"]
    for name in ("gate_up", "down"):
        mine, ours = experts(packed)[name], experts(rollout)[name]
        assert isinstance(mine, BlockScaled)
        assert mine.codes.tobytes() == ours.codes.tobytes()
        assert mine.scales.tobytes() == ours.scales.tobytes()
        assert np.array_equal(mine.outer, ours.outer)
    assert json.loads((tmp_path / "bf16/config.json").read_text())["eos_token_id"] == [257]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("", {}, "no command: say import or export"),
        ("inport", {}, "inport: say import or export"),
        ("import", {"workdir": "w"}, "import: --from must be given"),
        ("export", {}, "export: --workdir and --to must be given"),
        ("export", {"workdir": "w", "to": "t", "format": "fp8"}, "no import in w: make one"),
    ],
)
def test_command_lines_that_say_too_little(tmp_path, monkeypatch, name, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        command(name, **flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "--frm=x"], "Unknown command line flag 'frm'. Did you mean: from"),
        (["import", "--from=nowhere", "--workdir=w"], "error: no config.json in nowhere: not a"),
    ],
)
def test_bad_input_ends_with_one_message(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.checkpoint", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
