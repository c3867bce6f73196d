"""Hugging Face directories into parameters: names, repacking, what does not fit, imports."""

import dataclasses
import functools
import json
import re
import tracemalloc

import jax
import numpy as np
import pytest

from tests.models.hugging_face import small_checkpoints
from tests.models.hugging_face.small_checkpoints import BF16, CASES, FLAT, Case, Killed, config_json
from trace_jax.models import checkpoint_hf, config, decoder, upcycle
from trace_jax.models.checkpoint_hf import Held, Imported
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.ngram_embedding import HostTable
from trace_jax.parallel import mesh as meshes
from trace_jax.training import state as train_state

# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_fills_the_tree_that_the_decoder_declares(tmp_path, name):
    params, cfg = checkpoint_hf.load(small_checkpoints.directory(tmp_path, name))
    assert cfg == CASES[name].cfg
    declared = jax.eval_shape(functools.partial(decoder.init, cfg), jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, declared
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        kept = jax.tree_util.keystr(path).endswith(("['A_log']", "['delta_net']['norm']['scale']"))
        assert leaf.dtype == (np.float32 if kept else BF16), path


VLM = "model.language_model."
NAMES = {  # case: {tensor: (shape, our leaf in its layer, or outside layers)}; qwen.md 3.2
    "qwen3_moe": {
        "model.embed_tokens.weight": ((272, 64), "embed"),
        "model.norm.weight": ((64,), "final_norm/scale"),
        "lm_head.weight": ((272, 64), "head"),
        "model.layers.1.input_layernorm.weight": ((64,), "input_norm/scale"),
        "model.layers.1.post_attention_layernorm.weight": ((64,), "post_attention_norm/scale"),
        "model.layers.1.self_attn.q_proj.weight": ((512, 64), "attention/q"),
        "model.layers.1.self_attn.k_proj.weight": ((64, 64), "attention/k"),
        "model.layers.1.self_attn.v_proj.weight": ((64, 64), "attention/v"),
        "model.layers.1.self_attn.o_proj.weight": ((64, 512), "attention/o"),
        "model.layers.1.self_attn.q_norm.weight": ((32,), "attention/q_norm/scale"),
        "model.layers.1.self_attn.k_norm.weight": ((32,), "attention/k_norm/scale"),
        "model.layers.1.mlp.gate.weight": ((4, 64), "experts/router"),
    },
    "qwen3_5_nested": {
        VLM + "embed_tokens.weight": ((272, 64), "embed"),
        "lm_head.weight": ((272, 64), "head"),
        VLM + "layers.3.self_attn.q_proj.weight": ((1024, 64), "attention/q"),
        VLM + "layers.0.linear_attn.in_proj_qkv.weight": ((192, 64), "delta_net/qkv"),
        VLM + "layers.0.linear_attn.in_proj_z.weight": ((128, 64), "delta_net/z"),
        VLM + "layers.0.linear_attn.in_proj_b.weight": ((4, 64), "delta_net/b"),
        VLM + "layers.0.linear_attn.in_proj_a.weight": ((4, 64), "delta_net/a"),
        VLM + "layers.0.linear_attn.A_log": ((4,), "delta_net/A_log"),
        VLM + "layers.0.linear_attn.dt_bias": ((4,), "delta_net/dt_bias"),
        VLM + "layers.0.linear_attn.norm.weight": ((32,), "delta_net/norm/scale"),
        VLM + "layers.0.linear_attn.out_proj.weight": ((64, 128), "delta_net/out"),
        VLM + "layers.0.mlp.shared_expert.down_proj.weight": ((64, 32), "shared_expert/down"),
        VLM + "layers.0.mlp.shared_expert_gate.weight": ((1, 64), "shared_expert/gate"),
    },
    "qwen3_5": {
        "model.layers.0.mlp.experts.gate_up_proj": ((4, 64, 64), "experts/gate_up"),
        "model.layers.0.mlp.experts.down_proj": ((4, 64, 32), "experts/down"),
    },
    "qwen4_exp": {
        VLM + f"{tensor}.weight": (shape, leaf)
        for tensor, shape, leaf in (
            ("hyper_connection_mixer.hc_norm", (256,), "final_mixer/norm/scale"),
            ("hyper_connection_mixer.input_mix_weight_down", (16, 256), "final_mixer/down"),
            ("hyper_connection_mixer.input_mix_weight_up", (256, 16), "final_mixer/up"),
            ("layers.0.attn_hyper_connection.hc_norm", (256,), "mixer_connection/norm/scale"),
            ("layers.0.attn_hyper_connection.block_inject_weight", (4, 256),
             "mixer_connection/inject"),
            ("layers.0.mlp_hyper_connection.input_mix_weight_down", (16, 256),
             "feed_forward_connection/down"),
            ("layers.3.self_attn.indexer.index_qk_proj", (96, 64), "attention/indexer/qk"),
            ("layers.3.self_attn.indexer.q_layernorm", (32,), "attention/indexer/q_norm/scale"),
            ("layers.3.self_attn.indexer.k_layernorm", (32,), "attention/indexer/k_norm/scale"),
            ("layers.1.ple.key_proj", (256, 64), "ngram/key"),
            ("layers.1.ple.value_proj", (64, 64), "ngram/value"),
            ("layers.1.ple.norm_key", (256,), "ngram/key_norm/scale"),
            ("layers.1.ple.norm_query", (256,), "ngram/query_norm/scale"),
            ("layers.1.ple.norm_conv", (256,), "ngram/conv_norm/scale"),
        )
    },
    "llama": {"model.layers.1.mlp.down_proj.weight": ((32, 48), "mlp/down")},
}  # fmt: skip


def loaded(tmp_path, name):
    """(tensors, parameters, config) of a case's directory."""
    source = small_checkpoints.directory(tmp_path, name)
    return small_checkpoints.read(source), *checkpoint_hf.load(source)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes(tmp_path, name):
    tensors, params, cfg = loaded(tmp_path, name)
    for tensor, (shape, leaf) in NAMES[name].items():
        assert tensors[tensor].shape == shape, tensor
        layer = re.search(r"layers\.(\d+)\.", tensor)
        tree = small_checkpoints.layer_of(params, cfg, int(layer[1])) if layer else params
        for key in leaf.split("/"):
            tree = tree[key]
        assert np.asarray(tree).tobytes() == tensors[tensor].tobytes(), tensor


def test_gate_lies_above_up(tmp_path):
    tensors, params, cfg = loaded(tmp_path, "qwen3_5_nested")
    layer, prefix = small_checkpoints.layer_of(params, cfg, 2), VLM + "layers.2."
    halves = lambda module: np.concatenate(
        [tensors[f"{prefix}mlp.{module}.{half}_proj.weight"] for half in ("gate", "up")]
    )
    for expert in range(4):
        assert np.array_equal(layer["experts"]["gate_up"][expert], halves(f"experts.{expert}"))
        down = tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"]
        assert np.array_equal(layer["experts"]["down"][expert], down)
    assert np.array_equal(layer["shared_expert"]["gate_up"], halves("shared_expert"))
    conv = tensors[f"{prefix}linear_attn.conv1d.weight"]
    assert conv.shape == (192, 1, 4)
    assert np.array_equal(layer["delta_net"]["conv"], conv[:, 0])


def test_qwen3_next_is_interleaved_by_key_head(tmp_path):
    tensors, params, cfg = loaded(tmp_path, "qwen3_next")
    d, ours = cfg.delta_net, small_checkpoints.layer_of(params, cfg, 1)["delta_net"]
    ratio = d.num_value_heads // d.num_key_heads
    sizes = {"q": d.key_head_dim, "k": d.key_head_dim}
    sizes |= {"v": ratio * d.value_head_dim, "z": ratio * d.value_head_dim}
    found = {name: [] for name in "qkvzba"}
    for tensor, parts in (("qkvz", sizes), ("ba", {"b": ratio, "a": ratio})):
        rows = list(tensors[f"model.layers.1.linear_attn.in_proj_{tensor}.weight"])
        for _ in range(d.num_key_heads):
            for name, size in parts.items():
                found[name] += [rows.pop(0) for _ in range(size)]
    assert np.array_equal(ours["qkv"], found["q"] + found["k"] + found["v"])
    for name in "zba":
        assert np.array_equal(ours[name], found[name])


def test_ngram_shards_go_by_number(tmp_path):
    tensors, params, cfg = loaded(tmp_path, "qwen4_exp")
    name = VLM + "layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    shards = [tensors[name.format(shard)] for shard in range(13)]
    assert [len(shard) for shard in shards] == [32] * 12 + [24]
    assert config.ngram_rows(cfg.ngram) == 12 * 32 + 24
    table = small_checkpoints.layer_of(params, cfg, 1)["ngram"]["table"]
    assert np.array_equal(table, np.concatenate(shards))


def test_a_table_in_one_tensor(tmp_path):
    case = dataclasses.replace(CASES["qwen4_exp"], layout=FLAT, nested="")
    source = small_checkpoints.write(
        tmp_path / "a", small_checkpoints.tensors(case), config_json(case)
    )
    table = small_checkpoints.read(source)[
        "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    ]
    params, cfg = checkpoint_hf.load(source)
    assert np.array_equal(small_checkpoints.layer_of(params, cfg, 1)["ngram"]["table"], table)


# -- what does not fit -----------------------------------------------------------------------------


def message_of(tmp_path, change, case="qwen3_moe"):
    """The message for a directory whose tensors were changed."""
    made = small_checkpoints.tensors(CASES[case])
    change(made)
    source = small_checkpoints.write(tmp_path / "broken", made, config_json(CASES[case]))
    with pytest.raises(ValueError) as error:
        checkpoint_hf.load(source)
    return str(error.value)


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path):
    def change(made):
        for name in [name for name in made if "experts.3." in name]:
            del made[name]
        made["model.layers.0.self_attn.q_proj.bias"] = np.zeros(2, BF16)
        made["lm_head.weight"] = np.zeros((3, 64), BF16)

    lines = message_of(tmp_path, change).splitlines()
    assert lines[0].endswith("broken does not fit its config.json:")
    assert lines[1].startswith("  12 missing: model.layers.0.mlp.experts.3.gate_proj.weight, model")
    assert lines[1].count(",") == 10
    assert lines[1].endswith(", ...")
    assert lines[2] == "  1 unexpected: model.layers.0.self_attn.q_proj.bias"
    assert lines[3] == "  1 misshapen: lm_head.weight (3, 64), not (272, 64)"


def test_a_hash_that_is_not_ours_is_refused(tmp_path):
    name = VLM + "layers.1.ple.ple_embedding.ngram_heads_vocab_sizes"

    def change(made):
        assert list(made[name]) == [97, 101, 103, 107]
        made[name][0] += 2

    message = message_of(tmp_path, change, "qwen4_exp")
    assert f"{name} is [ 99 101 103 107], but the config makes it [ 97 101 103 107]" in message


def test_directories_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        checkpoint_hf.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(CASES["qwen3"])))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        checkpoint_hf.load(tmp_path)
    small_checkpoints.write_file(tmp_path / "model.safetensors", {"x": np.zeros(2, BF16)})
    with pytest.raises(ValueError, match="has 0 tensors named"):
        checkpoint_hf.load(tmp_path)


# -- imports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 20, 70])
def test_a_killed_import_continues(tmp_path, monkeypatch, count):
    source, work = small_checkpoints.directory(tmp_path, "qwen4_exp"), tmp_path / "work"
    small_checkpoints.kill_after(count, monkeypatch)
    with pytest.raises(Killed):
        small_checkpoints.imported(source, work)
    with pytest.raises(FileNotFoundError, match=r"the import in .* is unfinished: .*run it again"):
        Imported(work)
    monkeypatch.undo()
    before = small_checkpoints.stamps(work / "params")
    assert bool(before) == (count > 10)
    small_checkpoints.imported(source, work)
    after = small_checkpoints.stamps(work / "params")
    assert before.items() <= after.items()
    small_checkpoints.assert_same_trees(
        checkpoint_hf.load_imported(work)[0], checkpoint_hf.load(source)[0]
    )
    small_checkpoints.imported(source, work)  # nothing is left to do
    assert small_checkpoints.stamps(work / "params") == after


def test_a_directory_of_something_else_is_not_imported_into(tmp_path):
    work, source = tmp_path / "work", small_checkpoints.directory(tmp_path, "qwen3")
    small_checkpoints.imported(source, work)
    with pytest.raises(ValueError, match="work holds an import of another checkpoint"):
        small_checkpoints.imported(small_checkpoints.directory(tmp_path, "llama"), work)
    tuned = small_checkpoints.tensors(CASES["qwen3"], seed=1)  # other values, the same shapes
    tuned = small_checkpoints.write(
        tmp_path / "tuned", tuned, config_json(CASES["qwen3"]), shards=2
    )
    with pytest.raises(ValueError, match="work holds an import of another checkpoint"):
        small_checkpoints.imported(tuned, work)
    (work / "import.json").unlink()
    with pytest.raises(ValueError, match="work holds something else"):
        small_checkpoints.imported(source, work)
    with pytest.raises(FileNotFoundError, match=r"no import in .*nowhere"):
        checkpoint_hf.load_imported(tmp_path / "nowhere")


def test_only_a_few_rows_are_in_memory(tmp_path, monkeypatch):
    cfg = dataclasses.replace(
        CASES["qwen3_moe"].cfg, num_experts=8, moe_intermediate_size=256, hidden_size=256
    )
    case = Case(cfg, "qwen3_moe", FLAT._replace(fused_experts=True))
    made = small_checkpoints.tensors(case)
    matrix = 2 * 256 * 256 * 2  # gate and up of an expert, bytes in BF16
    assert sum(values.nbytes for values in made.values()) > 50 * matrix
    source = small_checkpoints.write(tmp_path / "a", made, config_json(case))
    del made
    monkeypatch.setattr(hf_tensors, "CHUNK", 2**16)
    tracemalloc.start()
    try:
        workdir = small_checkpoints.imported(source, tmp_path / "work")
        assert tracemalloc.get_traced_memory()[1] < 4 * matrix
        tracemalloc.reset_peak()
        small_checkpoints.export(workdir, tmp_path / "out", layout="split")
        assert tracemalloc.get_traced_memory()[1] < 4 * matrix
    finally:
        tracemalloc.stop()


def test_a_table_that_stays_on_disk(tmp_path):
    source, work = small_checkpoints.directory(tmp_path, "qwen4_exp"), tmp_path / "work"
    small_checkpoints.imported(source, work)
    whole, cfg = checkpoint_hf.load(source)
    wanted = small_checkpoints.layer_of(whole, cfg, 1)["ngram"]["table"]
    params, _ = checkpoint_hf.load_imported(work, host_table=True)
    table = params["layers_0"]["1"]["ngram"]["table"]
    assert isinstance(table, HostTable)
    assert isinstance(table.rows, np.memmap)
    in_memory = checkpoint_hf.load(source, host_table=True)[0]["layers_0"]["1"]["ngram"]["table"]
    raw = np.fromfile(work / "params/ngram_table_00001.bin", BF16)
    for rows in (table.rows, in_memory.rows, raw):
        assert rows.tobytes() == wanted.tobytes()
    held = Held(params, cfg, like=Imported(work))
    small_checkpoints.assert_same(
        small_checkpoints.read(small_checkpoints.export(held, tmp_path / "out")),
        small_checkpoints.read(source),
    )


@pytest.mark.parametrize("packed", [False, True])
def test_each_device_gets_its_share(tmp_path, packed):
    source, work = small_checkpoints.directory(tmp_path, "qwen3_moe"), tmp_path / "work"
    if packed:
        plain = small_checkpoints.imported(source, tmp_path / "plain")
        source = small_checkpoints.export(plain, tmp_path / "packed", format="nvfp4")
    small_checkpoints.imported(source, work)
    mesh, cfg = meshes.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}), CASES["qwen3_moe"].cfg
    masters = jax.eval_shape(functools.partial(decoder.init, cfg), jax.random.key(0))
    shardings = train_state.parameter_shardings(cfg, masters, mesh)
    params, _ = checkpoint_hf.load_imported(work, shardings)
    whole, _ = checkpoint_hf.load(source)
    small_checkpoints.assert_same_trees(params, whole)
    small_checkpoints.assert_same_trees(checkpoint_hf.load(source, shardings=shardings)[0], whole)
    down = params["layers_0"]["0"]["experts"]["down"]
    down = down.codes if packed else down
    assert down.sharding == shardings["layers_0"]["0"]["experts"]["down"]
    assert len(down.sharding.device_set) == 8
    assert down.addressable_shards[0].data.size < down.size


def test_parameters_that_no_model_type_holds_are_imported_all_the_same(tmp_path):
    """An upcycled Llama: experts, tied embeddings and no norms of query and key."""
    dense = dataclasses.replace(config.tiny(config.get("qwen3_30b_a3b")), **LLAMA)
    params = decoder.init(dense, jax.random.key(0))
    params, cfg = upcycle.upcycle(params, dense, 4, 2)
    with pytest.raises(ValueError, match="no Hugging Face model type can hold this model"):
        Held(params, cfg)
    checkpoint_hf.import_params(params, cfg, tmp_path / "work")
    again, found = checkpoint_hf.load_imported(tmp_path / "work")
    assert found == cfg
    assert jax.tree.all(jax.tree.map(np.array_equal, again, params))
    with pytest.raises(ValueError, match="work holds something already"):
        checkpoint_hf.import_params(params, cfg, tmp_path / "work")
    with pytest.raises(ValueError, match="no Hugging Face model type can hold this model"):
        small_checkpoints.export(Imported(tmp_path / "work"), tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "qwen4_exp"])
def test_imported_parameters_are_exported_with_a_config_of_their_own(tmp_path, name):
    params, cfg = checkpoint_hf.load(small_checkpoints.directory(tmp_path, name, "float32"))
    checkpoint_hf.import_params(params, cfg, tmp_path / "work")
    workdir = Imported(tmp_path / "work")
    sources = {"again": workdir, "tuned": Held(params, cfg, like=workdir)}
    for target, source in sources.items():
        again, found = checkpoint_hf.load(small_checkpoints.export(source, tmp_path / target))
        assert found == cfg
        small_checkpoints.assert_same_trees(again, params)


LLAMA = dict(
    num_layers=2, num_experts=0, num_experts_per_token=0, moe_intermediate_size=0,
    intermediate_size=64, tie_embeddings=True, qk_norm=False,
)  # fmt: skip


def test_a_packed_head_is_read_onto_a_mesh(tmp_path):
    """Its outer scale is one number, without an axis."""
    case = CASES["qwen3_moe"]
    source = small_checkpoints.directory(tmp_path, "qwen3_moe")
    small_checkpoints.imported(source, tmp_path / "work")
    options = dict(format="nvfp4", style="modelopt", quantize=(("head/in", "nvfp4"),))
    small_checkpoints.export(Imported(tmp_path / "work"), tmp_path / "packed", **options)
    mesh = meshes.make_mesh({"data": 1}, jax.devices()[:1])
    params, _ = checkpoint_hf.load(tmp_path / "packed", shardings=meshes.replicated(mesh))
    assert params["head"].outer.shape == ()
    assert params["head"].shape == (case.cfg.vocab_size, case.cfg.hidden_size)
