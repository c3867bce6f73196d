"""Hugging Face checkpoints in and out; a killed command continues when it is run again.

    python -m experiments.checkpoint import --from=DIR --workdir=OUT
    python -m experiments.checkpoint import --from=FILE.gguf --workdir=OUT [--upcycle=EXPERTS]
    python -m experiments.checkpoint export --workdir=OUT --to=DIR [--format=bf16|nvfp4]
        [--style=modelopt|compressed-tensors] [--layout=split|fused] [--quantize=SITES]

export takes an import, and without --format gives it back bit for bit; or a run directory of
experiments.rl, its newest parameters, in BF16 unless --format says otherwise. A GGUF file of the
Llama architecture is dense; --upcycle makes a mixture of it (models/upcycle.py), two a token.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags

from experiments import command_line
from trace_jax.models import checkpoint_hf, gguf_file, upcycle
from trace_jax.models.checkpoint_hf import Held, Imported, Options, Parameters
from trace_jax.models.hugging_face.tensors import read_json
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import warm_up
from trace_jax.rl.settings import resolve

FROM = flags.DEFINE_string("from", None, "import: the Hugging Face directory, or a GGUF file")
TO = flags.DEFINE_string("to", None, "export: an empty directory, or a new one")
WORKDIR = flags.DEFINE_string("workdir", None, "of the import, or a run directory to export")
UPCYCLE = flags.DEFINE_integer(
    "upcycle", 0, "import of a GGUF file: number of experts to copy each MLP into", lower_bound=0
)
DEQUANTIZE = flags.DEFINE_bool("dequantize", False, "import: NVFP4 as float32 arrays, not packed")
FORMAT = flags.DEFINE_string("format", "", "export: bf16 or nvfp4; default: as imported")
STYLE = flags.DEFINE_string(
    "style", "", "export: of packed weights, modelopt or compressed-tensors"
)
LAYOUT = flags.DEFINE_string("layout", "", "export: of experts, split or fused")
QUANTIZE = flags.DEFINE_list("quantize", [], "export: sites to pack; default: experts/*")
SHARD_GB = flags.DEFINE_float(
    "shard_gb", 5.0, "export: most bytes a file, in 1e9", lower_bound=1e-9
)
INPUT_SCALE = flags.DEFINE_float(
    "input_scale", 1.0, "export: static outer scale of activations that the source does not name"
)
LIKE = flags.DEFINE_string(
    "like", None, "export of a run: the import whose config and layout to take"
)


def export(workdir: Path, directory: Path) -> None:
    """Exports an import or a run's newest checkpoint.

    Raises FileNotFoundError where workdir is neither.
    """
    source, identity = _source(workdir)
    form = FORMAT.value or ("" if isinstance(source, Imported) else "bf16")
    options = Options(
        format=form,
        style=STYLE.value,
        layout=LAYOUT.value,
        quantize=tuple((pattern, "nvfp4") for pattern in QUANTIZE.value),
        shard_bytes=SHARD_GB.value * 1e9,
        input_scale=INPUT_SCALE.value,
    )
    checkpoint_hf.export(source, directory, options, identity)


def import_gguf(path: Path, workdir: Path) -> None:
    """Imports a GGUF file, dense or upcycled, with its tokenizer."""
    params, cfg = gguf_file.load(path)
    if UPCYCLE.value:
        chosen = min(2, UPCYCLE.value)
        params, cfg = upcycle.upcycle(params, cfg, UPCYCLE.value, chosen)
    workdir.mkdir(parents=True, exist_ok=True)
    gguf_file.write_tokenizer(path, workdir)  # first: what follows ends with the mark of the whole
    checkpoint_hf.import_params(params, cfg, workdir)


def _source(workdir: Path) -> tuple[Parameters, str]:
    """What to export, and what tells its values from others."""
    if not (workdir / "checkpoints").exists():
        imported = Imported(workdir)
        return imported, imported.facts["checkpoint"]
    settings = resolve(read_json(workdir / "config.json"))
    with jax.set_mesh(meshes.make_mesh({}, jax.devices()[:1])):
        step, params = warm_up.newest_params(settings, workdir / "checkpoints")
    like = LIKE.value or settings.source  # the import that the run started from
    like = Imported(like) if like else None
    held = Held(params, settings.cfg, like=like)
    if like is None and not settings.cfg.ngram:  # which names the end of text itself
        held.config["eos_token_id"] = list(settings.tokenizer.stop_ids)
    written = (workdir / "checkpoints" / f"{step}").stat().st_mtime_ns
    return held, f"{workdir.resolve()} {step} {written}"


def main(arguments: list[str]) -> None:
    """Imports or exports. Raises ValueError for a command line that says neither."""
    needed = {
        "import": {"from": FROM, "workdir": WORKDIR},
        "export": {"workdir": WORKDIR, "to": TO},
    }
    command = arguments[1] if len(arguments) == 2 else None
    missing = [f"--{name}" for name, flag in needed.get(command, {}).items() if not flag.value]
    if command not in needed or missing:
        raise ValueError(
            f"{' '.join(arguments[1:]) or 'no command'}: "
            + (f"{' and '.join(missing)} must be given" if missing else "say import or export")
            + "; python -m experiments.checkpoint --help"
        )
    if command == "import" and FROM.value.endswith(".gguf"):
        import_gguf(Path(FROM.value), Path(WORKDIR.value))
    elif command == "import":
        if UPCYCLE.value:
            raise ValueError(f"--upcycle={UPCYCLE.value}: only of a GGUF file")
        checkpoint_hf.import_checkpoint(FROM.value, WORKDIR.value, DEQUANTIZE.value)
    else:
        export(Path(WORKDIR.value), Path(TO.value))


def _run(arguments: list[str]) -> None:
    try:
        main(arguments)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(_run, flags_parser=command_line.parse)
