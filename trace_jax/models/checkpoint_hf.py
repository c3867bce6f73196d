"""Hugging Face checkpoints in and out.

    params, cfg = load(directory)               any directory as transformers saves it
    import_checkpoint(directory, workdir)       the same into files of our own, layer by layer
    params, cfg = load_imported(workdir)        back from these, stacked, sharded where wanted
    save(params, cfg, directory)                a Hugging Face directory of parameters in memory
    export(Imported(workdir), directory, ...)   ... of an import; BF16, or packed NVFP4

Imports and exports that were killed continue: each file is there whole or not at all. An imported
directory holds the checkpoint's config.json and tokenizer files, and

    import.json                          how the checkpoint was laid out
    params/layer_00000.safetensors ...   the arrays of a layer, by our names
    params/top.safetensors               embedding, head, last norm
    params/ngram_table_00001.bin         an n-gram table, row by row, to be mapped
    params/beside.safetensors            what is not of the language model, as it was
"""

import dataclasses
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from trace_jax.models.architecture import ModelConfig
from trace_jax.models.hugging_face import sources as hf_sources
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.names import Layout
from trace_jax.models.hugging_face.plan import Options, Plan, specs_of
from trace_jax.models.hugging_face.reading import Checkpoint
from trace_jax.models.hugging_face.sources import FACTS, TABLE, Held, Imported, Parameters
from trace_jax.models.hugging_face.stacking import stacked
from trace_jax.models.hugging_face.tensors import Spec, Writer

UNFINISHED = "export.json"  # in an export that is not finished: which one it is


def load(
    directory: str | Path, *, dequantize: bool = False, shardings: Any = None,
    host_table: bool = False,
) -> tuple[dict, ModelConfig]:  # fmt: skip
    """(parameters stacked over repeats, config) of a Hugging Face checkpoint; dtypes as on disk.

    dequantize: NVFP4 weights become float32 arrays (default: packed BlockScaled, codes and scales
    as on disk); FP8 always becomes BF16. shardings, host_table: as of hf_stacking.stacked.
    Raises FileNotFoundError for an incomplete directory, ValueError for a config that is not
    supported and for tensors that are missing, unexpected or misshapen.
    """
    checkpoint = Checkpoint(directory, dequantize)
    checkpoint.say_what_is_beside("left out")
    return stacked(checkpoint, shardings, host_table), checkpoint.cfg


def load_imported(
    workdir: str | Path, shardings: Any = None, host_table: bool = False
) -> tuple[dict, ModelConfig]:
    """(parameters stacked over repeats, config) of what `import_checkpoint` wrote.

    Arguments as of hf_stacking.stacked. Raises FileNotFoundError where an import is unfinished.
    """
    imported = Imported(workdir)
    return stacked(imported, shardings, host_table), imported.cfg


def import_checkpoint(
    directory: str | Path, workdir: str | Path, dequantize: bool = False, progress: bool = True
) -> None:
    """Streams a Hugging Face checkpoint into workdir, at most a few rows or one matrix in memory.

    Raises as `load` does, and ValueError where workdir holds something else.
    """
    checkpoint, workdir = Checkpoint(directory, dequantize), Path(workdir)
    checkpoint.say_what_is_beside("left out" if checkpoint.unpacks else "kept as they are")
    kept = _kept(checkpoint)
    facts = _facts(checkpoint, kept)
    if (workdir / FACTS).exists():
        if hf_tensors.read_json(workdir / FACTS) != facts:
            raise ValueError(f"{workdir} holds an import of another checkpoint; name another")
    elif (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds something else (it has a config.json); name another")
    hf_sources.params_path(workdir).mkdir(parents=True, exist_ok=True)
    hf_tensors.write_text(workdir / FACTS, json.dumps(facts, indent=2) + "\n")
    hf_sources.copy_small_files(checkpoint.directory, workdir, declared=not checkpoint.unpacks)

    layers = (None, *range(checkpoint.cfg.num_layers))
    sizes = [hf_tensors.total_bytes(checkpoint.specs(layer)) for layer in layers]
    with _bar("import", sum(sizes) + hf_tensors.total_bytes(kept), progress) as bar:
        for layer, size in zip(layers, sizes, strict=True):
            if not hf_sources.layer_path(workdir, layer).exists():
                _import_layer(checkpoint, layer, workdir)
            bar.update(size)
        path = hf_sources.params_path(workdir) / hf_sources.BESIDE
        if kept and not path.exists():
            with Writer(path, kept) as writer:
                for name, tensor in kept.items():
                    for rows in hf_tensors.chunks(tensor):
                        writer.write(name, rows)
        bar.update(hf_tensors.total_bytes(kept))


def import_params(params: dict, cfg: ModelConfig, workdir: str | Path) -> None:
    """Writes parameters in memory as an import does, also those no Hugging Face model type holds.

    Raises ValueError where workdir holds something already.
    """
    workdir = Path(workdir)
    if (workdir / FACTS).exists() or (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds something already; name another")
    hf_sources.params_path(workdir).mkdir(parents=True, exist_ok=True)
    for layer in (None, *range(cfg.num_layers)):
        stacked_arrays = hf_sources.layer_arrays(params, cfg, layer)
        arrays = {
            name: hf_sources.layer_array(array, cfg, layer)
            for name, array in stacked_arrays.items()
        }
        specs = {name: Spec(array.shape, array.dtype) for name, array in arrays.items()}
        with Writer(hf_sources.layer_path(workdir, layer), specs) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
    facts = {
        "layout": Layout()._asdict(),
        "quantization": "",
        "ngram_tables": {},
        "beside": 0,
        "checkpoint": f"{workdir.resolve()}",
        "sizes": dataclasses.asdict(cfg),
    }
    hf_tensors.write_text(workdir / "config.json", "{}\n")
    hf_tensors.write_text(workdir / FACTS, json.dumps(facts, indent=2) + "\n")


def save(params: dict, cfg: ModelConfig, directory: str | Path, **options: Any) -> None:
    """Writes parameters in memory as a Hugging Face directory; options: fields of Options.

    A save that was killed is not continued: nothing tells these values from others.
    """
    once = uuid.uuid4().hex
    export(Held(params, cfg), directory, Options(**options), identity=once, progress=False)


def export(
    source: Parameters, directory: str | Path, options: Options, identity: str = "",
    progress: bool = True,
) -> None:  # fmt: skip
    """Writes a Hugging Face directory, shard by shard.

    identity: names the values of the source, so that an export of others is not continued.
    Raises ValueError where the directory holds something else, and where the options do not fit.
    """
    directory, plan = Path(directory), Plan(source, options)
    shards = [specs_of(shard) for shard in plan.shards]
    listed = [(name, spec.shape, f"{spec.dtype}") for s in shards for name, spec in s.items()]
    digest = hashlib.sha256(f"{identity} {options} {listed}".encode())
    mark = {"export": digest.hexdigest()}
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / UNFINISHED).exists():
        if hf_tensors.read_json(directory / UNFINISHED) != mark:
            raise ValueError(f"{directory} holds another unfinished export; name an empty one")
    elif any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; name an empty directory")
    hf_tensors.write_text(directory / UNFINISHED, json.dumps(mark))

    names = [hf_tensors.SINGLE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    sizes = list(map(hf_tensors.total_bytes, shards))
    with _bar("export", sum(sizes), progress) as bar:
        for name, items, specs, size in zip(names, plan.shards, shards, sizes, strict=True):
            if not (directory / name).exists():
                with Writer(directory / name, specs) as writer:
                    for item in items:
                        item.write(writer)
            bar.update(size)
    if len(shards) > 1:
        placed = {t: name for name, specs in zip(names, shards, strict=True) for t in specs}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(placed.items()))}
        hf_tensors.write_text(directory / hf_tensors.INDEX, json.dumps(index, indent=2) + "\n")
    plan.write_small_files(directory)
    (directory / UNFINISHED).unlink()


def _bar(name, total, progress):
    return tqdm.tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=not progress)


def _facts(checkpoint, kept):
    """What an export needs to know, and by what a resumed import knows its checkpoint again."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
    for path in sorted({tensor.path for tensor in checkpoint.tensors.values()}):
        digest.update(hf_tensors.sample(path))
    tables = {}
    for layer in checkpoint.cfg.ngram.layers if checkpoint.cfg.ngram else ():
        spec = checkpoint.specs(layer)[TABLE]
        tables[f"{layer}"] = [hf_tensors.NAMES[np.dtype(spec.dtype)], list(spec.shape)]
    return {
        "layout": checkpoint.layout._asdict(),
        "quantization": "" if checkpoint.unpacks else checkpoint.quantization.method,
        "ngram_tables": tables,
        "beside": len(kept),
        "checkpoint": digest.hexdigest(),
    }


def _kept(checkpoint):
    """Tensors that an import keeps as they are: those beside the language model, and outer scales
    that are stored as reciprocals, since a reciprocal's reciprocal may differ in the last bit.

    None where the import is no longer quantized as declared.
    """
    if checkpoint.unpacks:
        return {}
    kept, style = set(checkpoint.beside()), checkpoint.quantization.style
    if style.reciprocal:
        kept |= {name for name in checkpoint.tensors if name.endswith(style.outer)}
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name in kept}


def _import_layer(checkpoint, layer, workdir):
    specs = checkpoint.specs(layer)
    if specs.pop(TABLE, None) is not None:
        path = hf_sources.table_path(workdir, layer)
        hf_tensors.write_raw(path, checkpoint.chunks(layer, TABLE))
    with Writer(hf_sources.layer_path(workdir, layer), specs) as writer:
        for name in specs:
            for rows in checkpoint.chunks(layer, name):
                writer.write(name, rows)
