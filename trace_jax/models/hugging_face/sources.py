"""Where parameters are read from to be stacked or exported: an imported directory, or memory.

Arrays go by our names, layer by layer; layer None has those outside layers. A packed leaf is three
arrays: "experts/down/codes", ".../scales" and ".../outer".
"""

import functools
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.hugging_face import config as hf_config
from trace_jax.models.hugging_face import names as hf_names
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.names import Layout
from trace_jax.models.hugging_face.quantized import PARTS, Quantization
from trace_jax.models.hugging_face.tensors import Spec, Stored
from trace_jax.models.ngram_embedding import HostTable

LOG = logging.getLogger(__name__)
TABLE = "ngram/table"
SCALES = ("_scale", "_scale_2", "_scale_inv")  # how the names of a quantization's numbers end
FACTS, BESIDE = "import.json", "beside.safetensors"
COPIED = (  # beside the weights
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "hf_quant_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class Parameters(Protocol):
    """What an export reads."""

    cfg: ModelConfig
    config: dict[str, Any]  # config.json; empty of parameters imported without one
    layout: Layout
    quantization: Quantization  # as config declares it
    directory: Path | None  # with tokenizer and other small files
    beside: Mapping[str, Stored]  # tensors that are not of the language model

    def specs(self, layer: int | None) -> dict[str, Spec]:
        """Shape and dtype of each array of a layer."""

    def rows(self, layer: int | None, name: str, part: int, rows: slice) -> np.ndarray:
        """Rows of one part (expert) of an array, or of the whole of it."""

    def outer(self, layer: int | None, name: str, part: int) -> np.ndarray:
        """The outer scale of one part of a packed leaf."""


class Imported:
    """A directory that checkpoint_hf.import_checkpoint filled."""

    def __init__(self, workdir: str | Path) -> None:
        """Reads headers. Raises FileNotFoundError for a directory that is none, or unfinished."""
        self.directory = Path(workdir)
        if not (self.directory / FACTS).exists():
            raise FileNotFoundError(
                f"no import in {workdir}: make one with experiments.checkpoint import"
            )
        self.facts = hf_tensors.read_json(self.directory / FACTS)
        self.config = hf_tensors.read_json(self.directory / "config.json")
        sizes = self.facts.get("sizes")  # of a model that config.json cannot describe
        self.cfg = ModelConfig(**sizes) if sizes else hf_config.read(self.config)
        self.layout = Layout(**self.facts["layout"])
        self.quantization = Quantization(self.facts["quantization"])
        layers = (None, *range(self.cfg.num_layers))
        paths = {layer: layer_path(self.directory, layer) for layer in layers}
        beside = [params_path(self.directory) / BESIDE] if self.facts["beside"] else []
        absent = [path.name for path in (*paths.values(), *beside) if not path.exists()]
        if absent:
            raise FileNotFoundError(
                f"the import in {workdir} is unfinished: {len(absent)} files are missing, "
                f"{absent[:10]}; run it again"
            )
        self.beside = hf_tensors.stored_tensors(beside[0]) if beside else {}
        self._layers = {layer: hf_tensors.stored_tensors(path) for layer, path in paths.items()}
        for layer, (dtype, shape) in self.facts["ngram_tables"].items():
            path = table_path(self.directory, int(layer))
            table = Stored(path, 0, hf_tensors.DTYPES[dtype], tuple(shape))
            self._layers[int(layer)][TABLE] = table

    def specs(self, layer: int | None) -> dict[str, Spec]:
        """Shape and dtype of each array of a layer."""
        return {name: Spec(t.shape, t.dtype) for name, t in self._layers[layer].items()}

    def chunks(self, layer: int | None, name: str) -> Iterator[np.ndarray]:
        """The values of an array in order, a few rows at a time."""
        return hf_tensors.chunks(self._layers[layer][name])

    def mapped(self, layer: int | None, name: str) -> np.ndarray:
        """An array as a memory map."""
        return hf_tensors.mapped(self._layers[layer][name])

    def rows(self, layer: int | None, name: str, part: int, rows: slice) -> np.ndarray:
        """Rows of one part (expert) of an array, or of the whole of it."""
        tensor, start = self._layers[layer][name], rows.start
        if len(tensor.shape) == 3:  # parts below one another
            start += part * tensor.shape[1]
            tensor = tensor._replace(shape=(-1, tensor.shape[2]))
        return hf_tensors.read(tensor, start, rows.stop - rows.start)

    def outer(self, layer: int | None, name: str, part: int) -> np.ndarray:
        """The outer scale of one part of a packed leaf."""
        return hf_tensors.read(self._layers[layer][f"{name}/outer"]).reshape(-1)[part]


def params_path(workdir: Path) -> Path:
    """The folder of an import's arrays."""
    return workdir / "params"


def layer_path(workdir: Path, layer: int | None) -> Path:
    """The file of a layer, or of what lies outside layers."""
    name = "top" if layer is None else f"layer_{layer:05d}"
    return params_path(workdir) / f"{name}.safetensors"


def table_path(workdir: Path, layer: int) -> Path:
    """The file of a layer's n-gram table: its rows, and nothing else."""
    return params_path(workdir) / f"ngram_table_{layer:05d}.bin"


def copy_small_files(source: Path, target: Path, declared: bool = True) -> None:
    """Copies what a checkpoint directory has beside its weights: config, tokenizer, templates.

    declared: with what they say of quantization.
    """
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if not declared:
        (target / "hf_quant_config.json").unlink(missing_ok=True)
        config = hf_tensors.read_json(target / "config.json")
        config.pop("quantization_config", None)
        hf_tensors.write_text(target / "config.json", json.dumps(config, indent=2) + "\n")


class Held:
    """Parameters in memory, with a config.json made for them or that of where they come from."""

    def __init__(self, params: dict, cfg: ModelConfig, like: Parameters | None = None) -> None:
        """like: where config, layout and tokenizer come from.

        Raises ValueError where no model type holds the model, or `like` is another model.
        """
        self.cfg, self._params = cfg, params
        self.quantization, dtype = Quantization(), f"{params['embed'].dtype}"
        if like is None:
            self.config, self.layout = described(cfg, dtype)
            self.directory, self.beside = None, {}
        else:
            hf_config.check_same(cfg, like.cfg, f"the model in {like.directory}")
            self.config = hf_config.with_dtype(like.config, dtype)
            self.config.pop("quantization_config", None)
            self.layout, self.directory = like.layout, like.directory
            self.beside = dict(like.beside)
            if like.quantization.method:
                self.beside = unquantized(self.beside)
            self.beside.pop(hf_names.HEAD, None)  # of tied embeddings: a copy that is stale now

    def specs(self, layer: int | None) -> dict[str, Spec]:
        """Shape and dtype of each array of a layer."""
        stacked = 0 if layer is None else 1
        return {
            name: Spec(array.shape[stacked:], array.dtype)
            for name, array in layer_arrays(self._params, self.cfg, layer).items()
        }

    def rows(self, layer: int | None, name: str, part: int, rows: slice) -> np.ndarray:
        """Rows of one part (expert) of an array, or of the whole of it."""
        array = self._array(layer, name)
        return array[part][rows] if array.ndim == 3 else array[rows]

    def outer(self, layer: int | None, name: str, part: int) -> np.ndarray:
        """The outer scale of one part of a packed leaf."""
        return self._array(layer, f"{name}/outer").reshape(-1)[part]

    @functools.lru_cache(maxsize=4)  # noqa: B019  (host copies of the leaves in work)
    def _array(self, layer, name):
        return layer_array(layer_arrays(self._params, self.cfg, layer)[name], self.cfg, layer)


def described(cfg: ModelConfig, dtype: str) -> tuple[dict[str, Any], Layout]:
    """(config.json, Layout) of the first model type that holds a model.

    Raises ValueError where none does.
    """
    family = hf_config.family_for(cfg)
    layout = Layout(interleaved=family == "qwen3_next", ngram_shards=1 if cfg.ngram else 0)
    return hf_config.write(cfg, family, dtype), layout


def layer_arrays(params: dict, cfg: ModelConfig, layer: int | None) -> dict[str, Any]:
    """The arrays of a parameter tree that hold a layer, stacked over repeats."""
    if layer is None:
        stacks = {segment.name for segment in architecture.segments(cfg)}
        return dict(named({key: leaf for key, leaf in params.items() if key not in stacks}))
    place = architecture.places(cfg)[layer]
    return dict(named(params[place.segment][place.position]))


def layer_array(stacked: Any, cfg: ModelConfig, layer: int | None) -> np.ndarray:
    """A layer's part of one of its `layer_arrays`, on the host."""
    if layer is None:
        return np.asarray(stacked)
    repeat = architecture.places(cfg)[layer].repeat
    if isinstance(stacked, np.ndarray):
        return stacked[repeat]
    return np.asarray(jax.lax.dynamic_index_in_dim(stacked, repeat, keepdims=False))


def unquantized(beside: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors that no quantization is needed to read; says what is left out."""
    wide = [np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)]
    kept = {
        name: tensor
        for name, tensor in beside.items()
        if tensor.dtype in wide and not name.endswith(SCALES)
    }
    if packed := [name for name in beside if name not in kept and not name.endswith(SCALES)]:
        LOG.warning("%d quantized tensors are left out: %s ...", len(packed), packed[:3])
    return kept


def named(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name, array) of every array of a tree of parameters."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named(value, f"{path}/{key}" if path else key)
    elif isinstance(tree, BlockScaled):
        if tree.fmt != "nvfp4":
            raise ValueError(f"{path} is packed {tree.fmt}; only nvfp4 can be exported")
        yield from ((f"{path}/{part}", getattr(tree, part)) for part in PARTS)
    elif isinstance(tree, HostTable):
        yield path, tree.rows[None]
    else:
        yield path, tree
