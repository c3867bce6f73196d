"""From a ConfigDict to what runs: validated, frozen, every name resolved, before any long work.

Below this module nobody sees a ConfigDict.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp

from trace_jax.guidance import policy as policies
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture
from trace_jax.models import config as models
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.hugging_face.sources import Imported
from trace_jax.rl import methods
from trace_jax.rl.methods import Method
from trace_jax.rl.objective import Bounds, Objective
from trace_jax.rl.tokenizer import ByteTokenizer, CheckpointTokenizer, Tokenizer
from trace_jax.rollout.sampler import Sampler
from trace_jax.training import state as train_state
from trace_jax.training.step import OLD_LOG_PROBS, Trainer, WarmUp


def section(kind: type, config: Mapping, key: str):  # noqa: ANN201  (an instance of kind)
    """The section `config[key]` as a dataclass `kind`.

    Raises ValueError naming the fields that are missing or unknown.
    """
    return architecture.part(kind, config[key], f"config.{key}")


def require_above(limit: float, section: object, prefix: str, *names: str) -> None:
    """Raises ValueError naming the first of these fields that is not finite and above limit."""
    for name in names:
        value = getattr(section, name)
        above = value > limit and math.isfinite(value)
        require(above, prefix + name, value, f"must be finite and above {limit}")


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raises ValueError naming the key, its value and the rule it breaks."""
    if not condition:
        raise ValueError(f"config.{key}={value!r}: {rule}")


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Puts the key of the config in front of a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"config.{key}: {error}") from error


def require_finite(what: str, step: int, value: float) -> None:
    """Raises FloatingPointError naming the step where a value is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"{what} is {value} at step {step}; the last checkpoint is intact. Lower the learning "
            "rate, in another --workdir, or find the source with --config.debug_nans=True"
        )


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How a batch is sampled."""

    prompts: int
    completions: int
    prompt_length: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    unpack_once: bool

    def __post_init__(self):
        require_above(0, self, "rollout.", "prompts", "prompt_length", "max_new_tokens")
        require_above(1, self, "rollout.", "completions")
        require_above(0, self, "rollout.", "temperature")
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "lies in (0, 1]; 1 keeps all")
        rule = "must be a whole number of tokens, 0 for all"
        require(self.top_k in range(2**31), "rollout.top_k", self.top_k, rule)

    @property
    def batch(self) -> int:
        """Sequences a rollout."""
        return self.prompts * self.completions


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """How a batch is learned from; "" takes the method's own choice."""

    learning_rate: float
    max_grad_norm: float
    loss: str
    clip_low: float
    clip_high: float
    ratio_cap: float
    gspo_clip_low: float
    gspo_clip_high: float
    tbpo_low: float
    tbpo_high: float
    correction: str
    tis_cap: float
    icepop_low: float
    icepop_high: float
    sequence_mask_low: float
    sequence_mask_high: float
    head_tokens: int
    drop_zero_variance: bool
    updates_per_rollout: int
    guided_updates: int
    old_log_probs: str
    staleness: int
    max_staleness: int

    def __post_init__(self):
        for low in ("clip_low", "gspo_clip_low"):
            value = getattr(self, low)
            require(0 < value < 1, f"rl.{low}", value, "must lie in (0, 1)")
        require_above(0, self, "rl.", "clip_high", "gspo_clip_high", "head_tokens")
        for band in ("tbpo", "icepop", "sequence_mask"):
            low, high = getattr(self, f"{band}_low"), getattr(self, f"{band}_high")
            require(0 <= low < 1, f"rl.{band}_low", low, "must lie in [0, 1)")
            require(high > 1, f"rl.{band}_high", high, "must exceed 1")
        require(self.tis_cap >= 1, "rl.tis_cap", self.tis_cap, "must be 1 or more")
        rule = f"must exceed 1 + rl.clip_high = {1 + self.clip_high}"
        require(self.ratio_cap > 1 + self.clip_high, "rl.ratio_cap", self.ratio_cap, rule)
        require_above(0, self, "rl.", "learning_rate", "max_grad_norm", "updates_per_rollout")
        require_above(-1, self, "rl.", "guided_updates")
        rule = f"choose one of {OLD_LOG_PROBS}, or '' for what the method needs"
        chosen = self.old_log_probs
        require(chosen in ("", *OLD_LOG_PROBS), "rl.old_log_probs", chosen, rule)
        rule = f"must lie between 0 and rl.max_staleness={self.max_staleness}"
        require(0 <= self.staleness <= self.max_staleness, "rl.staleness", self.staleness, rule)


@dataclasses.dataclass(frozen=True)
class WarmUpSettings:
    """The supervised phase."""

    batch: int
    learning_rate: float

    def __post_init__(self):
        require_above(0, self, "warmup.", "batch", "learning_rate")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Held-out evaluation."""

    every: int
    prompts: int

    def __post_init__(self):
        require_above(0, self, "evaluation.", "every", "prompts")


@dataclasses.dataclass(frozen=True)
class GuidanceSettings:
    """What is recorded; "" takes the method's own choice."""

    encoding: str
    layers: str
    sites: tuple[str, ...]
    audit_sequences: int
    check_rows: bool

    def __post_init__(self):
        require_above(-1, self, "guidance.", "audit_sequences")
        require(len(self.sites) > 0, "guidance.sites", self.sites, "name one site pattern or more")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole configuration, resolved."""

    seed: int
    steps: int
    warmup_steps: int
    cfg: ModelConfig
    dtype: jnp.dtype
    method: Method
    objective: Objective
    quantized: Policy  # what FP4 means in this run, and in its evaluation
    recording: Recording | None
    audit: Recording | None
    check: Recording | None
    task: Mapping
    rollout: RolloutSettings
    rl: RLSettings
    warmup: WarmUpSettings
    evaluation: EvaluationSettings
    checkpoint_every: int
    samples_every: int
    mesh: Mapping
    engine_noise: float
    debug_nans: bool
    source: Path | None  # an import whose parameters the run starts from; None: from the seed
    tokenizer: Tokenizer

    def __post_init__(self):
        require_above(-1, self, "", "seed", "steps", "warmup_steps")
        require_above(0, self, "", "checkpoint_every", "samples_every")
        require(0 <= self.engine_noise < 1, "engine_noise", self.engine_noise, "lies in [0, 1)")
        correction = self.objective.correction
        require(
            correction == "none" or self.old_log_probs == "trainer",
            "rl.old_log_probs", self.rl.old_log_probs,
            f"correction {correction!r} compares the trainer's own with the rollout's; set "
            "'trainer', or rl.correction='none'",
        )  # fmt: skip
        fits = not self.objective.centres or self.rl.head_tokens <= self.cfg.vocab_size
        rule = f"the vocabulary has {self.cfg.vocab_size}"
        require(fits, "rl.head_tokens", self.rl.head_tokens, rule)

    @property
    def rollout_policy(self) -> Policy:
        """What the rollout quantizes."""
        return self.quantized if self.method.rollout_fp4 else NOTHING

    @property
    def training_policy(self) -> Policy:
        """What the training forward quantizes; FP4 sites in BF16 are only observed."""
        weights = self.method.training_fp4
        if weights and self.method.training_activations:
            return self.quantized
        return self.quantized.only(weights=weights, sites=()) if weights or self.audit else NOTHING

    @property
    def old_log_probs(self) -> str:
        """What the importance ratio is taken to (training/step.py)."""
        fits = "rollout" if self.objective.correction == "none" else "trainer"
        return self.rl.old_log_probs or fits

    @property
    def guided(self) -> tuple[bool, ...]:
        """Whether each update on a rollout follows its guidance; none does where there is none."""
        last = self.rl.guided_updates if self.recording else 0
        return tuple(i < last for i in range(self.rl.updates_per_rollout))

    def sampler(self) -> Sampler:
        """The Sampler of training rollouts."""
        return dataclasses.replace(
            self.evaluator(self.rollout_policy),
            recording=self.recording,
            audit=self.audit,
            check=self.check,
            top_p=self.rollout.top_p,
            top_k=self.rollout.top_k,
            head_tokens=self.rl.head_tokens if self.objective.centres else 0,
        )

    def evaluator(self, policy: Policy) -> Sampler:
        """A Sampler that records and truncates nothing (a policy as deployed, or BF16)."""
        return Sampler(
            self.cfg,
            policy,
            self.dtype,
            self.rollout.max_new_tokens,
            self.tokenizer.stop_ids,
            self.tokenizer.pad_id,
            unpack_once=self.rollout.unpack_once,
        )

    def trainer(self) -> Trainer:
        """The RL Trainer."""
        return Trainer(
            self.cfg,
            self.training_policy,
            self.dtype,
            train_state.optimizer(self.rl.learning_rate, self.rl.max_grad_norm),
            self.rollout.temperature,
            self.method.replay_routes,
            self.objective,
            self.old_log_probs,
            self.audit,
            self.check,
            self.engine_noise,
        )

    def warm_up(self) -> WarmUp:
        """The supervised trainer, its learning rate on a cosine to zero."""
        schedule = train_state.cosine(self.warmup.learning_rate, self.warmup_steps)
        return WarmUp(self.cfg, self.dtype, train_state.optimizer(schedule, 1.0))


KEYS = (
    "method", "seed", "steps", "warmup_steps", "model", "dtype", "task", "quantize", "guidance",
    "rollout", "rl", "warmup", "evaluation", "checkpoint_every", "samples_every", "mesh",
    "engine_noise", "debug_nans",
)  # fmt: skip


def resolve(config: Mapping) -> Settings:
    """The Settings of a config (ConfigDict or dict).

    Raises ValueError, naming key, value and fix, for whatever does not fit together.
    """
    given = set(config.keys())
    if given != set(KEYS):
        raise ValueError(
            f"config: missing {sorted(set(KEYS) - given)}, unknown {sorted(given - set(KEYS))}; "
            f"its fields are {list(KEYS)}"
        )
    method = methods.get(config["method"])
    source = imported_directory(config["model"])
    cfg = model_of(config, source)
    dtype = config["dtype"]
    require(dtype in ("bfloat16", "float32"), "dtype", dtype, "choose 'bfloat16' or 'float32'")
    with naming("quantize"):
        quantized = policies.resolve(config["quantize"], architecture.sites(cfg))
    quantized = dataclasses.replace(quantized, residual=method.residual)
    guidance = section(GuidanceSettings, config, "guidance")
    rollout = section(RolloutSettings, config, "rollout")
    recording = _recording(method, guidance, cfg, quantized)
    rl = section(RLSettings, config, "rl")
    check_blocks(cfg, quantized)  # under every method: all are evaluated in FP4
    return Settings(
        seed=config["seed"],
        steps=config["steps"],
        warmup_steps=config["warmup_steps"],
        cfg=cfg,
        source=source,
        dtype=jnp.dtype(dtype),
        method=method,
        objective=_objective(method, rl),
        quantized=quantized,
        recording=recording,
        audit=_audit(method, guidance, cfg, quantized, rollout.batch),
        check=record.checking(recording) if recording and guidance.check_rows else None,
        task=config["task"],
        rollout=rollout,
        rl=rl,
        warmup=section(WarmUpSettings, config, "warmup"),
        evaluation=section(EvaluationSettings, config, "evaluation"),
        checkpoint_every=config["checkpoint_every"],
        samples_every=config["samples_every"],
        mesh=config["mesh"],
        engine_noise=config["engine_noise"],
        debug_nans=config["debug_nans"],
        tokenizer=tokenizer_of(source, cfg),
    )


def imported_directory(model: str | Mapping) -> Path | None:
    """The directory that `config.model` names, or None where it is the name of a size, or sizes."""
    if isinstance(model, str) and model not in models.MODELS and Path(model).is_dir():
        return Path(model)
    return None


def model_of(config: Mapping, source: Path | None) -> ModelConfig:
    """The sizes of `config.model`: of an import, by name, or written out.

    Raises ValueError for a name that is neither a size nor a directory, FileNotFoundError for a
    directory that holds no finished import.
    """
    if source is not None:
        return Imported(source).cfg
    if not isinstance(config["model"], str):
        return section(ModelConfig, config, "model")
    if config["model"] not in models.MODELS:
        raise ValueError(
            f"config.model={config['model']!r}: no such directory (an import of "
            f"experiments.checkpoint), and no size by this name: choose one of "
            f"{sorted(models.MODELS)}"
        )
    return models.get(config["model"])


def tokenizer_of(source: Path | None, cfg: ModelConfig) -> Tokenizer:
    """Bytes for models of the seed, else the tokenizer that the import brought along.

    Raises ValueError where it brought none, and the model's vocabulary is not that of bytes.
    """
    if source is not None and (source / "tokenizer.json").exists():
        return CheckpointTokenizer(source)
    tokenizer = ByteTokenizer()
    if source is not None and cfg.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"config.model={str(source)!r} has no tokenizer.json, and a vocabulary of "
            f"{cfg.vocab_size}: copy the checkpoint's tokenizer files there"
        )
    return tokenizer


def check_blocks(cfg: ModelConfig, quantized: Policy) -> None:
    """Raises ValueError where a quantized width is no multiple of its format's block."""
    sites = architecture.sites(cfg)
    for site, fmt in dict.fromkeys(quantized.formats + quantized.weights):
        width, key, block = sites[site].width, sites[site].key, policies.block(fmt)
        require(width % block == 0, f"model.{key}", width,
                f"site {site} is {fmt}, whose blocks of {block} must divide it; "
                f"take {-(-width // block) * block}, or set ('{site}', 'bf16') first in quantize",
                )  # fmt: skip


def _objective(method, rl) -> Objective:
    bounds = {field.name: getattr(rl, field.name) for field in dataclasses.fields(Bounds)}
    with naming("rl"):
        return Objective(
            rl.loss or method.loss, rl.correction or method.correction, Bounds(**bounds)
        )


def _recording(method, guidance, cfg, quantized) -> Recording | None:
    if method.encoding is None:
        return None
    with naming("guidance"):
        recording = record.recording(
            guidance.encoding or method.encoding,
            tuple(guidance.sites),
            guidance.layers or method.layers,
            architecture.site_layers(cfg),
            quantized,
        )
    require(method.replay_routes or "experts/mid" not in recording.sites, "guidance.sites",
            guidance.sites, "guiding experts/mid needs a method that replays routes")  # fmt: skip
    return recording


def _audit(method, guidance, cfg, quantized, batch) -> Recording | None:
    """Full codes of all layers for a few sequences; not of experts/mid, whose rows are routes'."""
    sites = tuple(site for site in quantized.sites if site != "experts/mid")
    if not (method.rollout_fp4 and guidance.audit_sequences and sites):
        return None
    require(guidance.audit_sequences <= batch, "guidance.audit_sequences",
            guidance.audit_sequences, f"a rollout has {batch} sequences")  # fmt: skip
    audit = record.recording("codes", sites, "all", architecture.site_layers(cfg), quantized)
    return dataclasses.replace(audit, sequences=guidance.audit_sequences)
