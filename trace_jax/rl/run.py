"""The run: warm-up, then rollout, reward, guided update, evaluation, until the steps are done.

    rollout -> rewards -> advantages -> update -> pack weights -> rollout ...
One row of metrics a step. Work for step n + 1 is dispatched before the numbers of step n are read,
so that the device does not wait for the host.
"""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from trace_jax.analysis import coverage, plots
from trace_jax.analysis.run_directory import RunDirectory, read_metrics
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import decoder, packing
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import batches, experience, tasks
from trace_jax.rl.evaluation import accuracy
from trace_jax.rl.queue import RolloutQueue
from trace_jax.rl.settings import Settings, require, require_finite, resolve
from trace_jax.rl.warm_up import initial_params, warm_up
from trace_jax.rollout.sampler import Rollout
from trace_jax.training import state as train_state
from trace_jax.training.checkpoint import Checkpoints
from trace_jax.training.state import TrainState
from trace_jax.training.step import TrainBatch

LOG = logging.getLogger("trace_jax")
global_norm = jax.jit(optax.global_norm)

METRICS = (  # every row has these; None where the method has no such quantity
    "reward/mean",
    "eval/accuracy_fp4",
    "eval/accuracy_bf16",
    "mismatch/code_rate",
    "mismatch/scale_rate",
    "mismatch/d_act",
    "mismatch/logp_abs_mean",
    "mismatch/logp_abs_max",
    "mismatch/kl_k3_nats",
    "mismatch/route_rate",
    "mismatch/ess",
    "guidance/bytes_per_token",
    "guidance/out_of_bracket_rate",
    "policy/entropy_nats",
    "policy/staleness",
    "rollout/tokens_per_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
)


def run(config: Mapping, workdir: str | Path, progress: bool = True) -> dict:
    """Trains as `config` says and returns the summary; resumes from workdir's newest checkpoint.

    Raises ValueError for bad configuration or data before any long work, and FloatingPointError
    when a loss or gradient is not finite (the last checkpoint then stays as it is).
    """
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    check_data(settings, task)
    mesh = meshes.make_mesh(settings.mesh)
    nans = jax.debug_nans(settings.debug_nans)
    with RunDirectory(workdir) as directory, jax.set_mesh(mesh), nans:
        loop = Loop(settings, task, directory, progress)
        try:
            directory.write_config(
                config.to_dict() if hasattr(config, "to_dict") else dict(config),
                may_differ=("steps", "debug_nans"),
                resumes=loop.checkpoints.latest() is not None,
            )
            LOG.info("FP4 coverage\n%s", coverage_table(settings))
            return loop.run()
        finally:
            loop.checkpoints.close()


def check_data(settings: Settings, task: tasks.Task) -> None:
    """Raises ValueError for prompts, answers, batches or an evaluation that would not fit later."""
    check_mesh(settings)
    length = settings.rollout.prompt_length + settings.rollout.max_new_tokens
    batches.check_prompts(task, settings.tokenizer, settings.rollout.prompt_length)
    batches.check_answers(task, settings.tokenizer, settings.rollout.max_new_tokens)
    if settings.warmup_steps:
        batches.check_solutions(task, settings.tokenizer, length)
    batches.test_batch(
        task, settings.tokenizer, settings.evaluation.prompts, settings.rollout.prompt_length
    )
    if settings.cfg.vocab_size < settings.tokenizer.vocab_size:
        raise ValueError(
            f"config.model.vocab_size={settings.cfg.vocab_size} is below the tokenizer's "
            f"{settings.tokenizer.vocab_size}; raise it"
        )


def check_mesh(settings: Settings) -> None:
    """Raises ValueError for a mesh that does not fit the devices, the model or a batch."""
    mesh = meshes.make_mesh(settings.mesh)
    shares = math.prod(mesh.shape[axis] for axis in meshes.BATCH)
    sizes = {
        "rollout.prompts * config.rollout.completions": settings.rollout.batch,
        "warmup.batch": settings.warmup.batch,
        "evaluation.prompts": settings.evaluation.prompts,
    }
    params = jax.eval_shape(functools.partial(decoder.init, settings.cfg), jax.random.key(0))
    train_state.parameter_shardings(settings.cfg, params, mesh)
    for key, size in sizes.items():
        rule = f"must be a multiple of mesh.data * mesh.fsdp * mesh.expert = {shares}"
        require(size % shares == 0, key, size, rule)


def coverage_table(settings: Settings) -> str:
    """What is in FP4 in the rollout, as text."""
    length = settings.rollout.prompt_length + settings.rollout.max_new_tokens
    return coverage.table(coverage.coverage(settings.rollout_policy, settings.cfg, length))


def seconds_until_ready(arrays: dict) -> float:
    """How long the host now waits for arrays (seconds)."""
    start = time.perf_counter()
    jax.block_until_ready(arrays)
    return time.perf_counter() - start


class Pending(NamedTuple):
    """A step that was dispatched and whose numbers were not read yet."""

    step: int
    row: dict
    metrics: dict
    dispatched: float  # seconds


class Loop:
    """One run's moving parts. Everything that decides the numbers is in `settings` and `state`."""

    def __init__(
        self, settings: Settings, task: tasks.Task, directory: RunDirectory, progress: bool
    ) -> None:
        """Compiles nothing and reads no checkpoint yet."""
        self.settings, self.task = settings, task
        self.directory, self.progress = directory, progress
        self.checkpoints = Checkpoints(directory.checkpoints)
        self.trainer, self.sampler = settings.trainer(), settings.sampler()
        self.key = jax.random.key(settings.seed)
        self.queue = RolloutQueue(settings.rl.max_staleness)

    def run(self) -> dict:
        """Runs to the last step; returns the summary, also written to summary.json."""
        started = time.perf_counter()
        first_step, state = self.restore_or_warm_up()
        self.directory.truncate_metrics(first_step)
        bar = tqdm.tqdm(
            range(first_step, self.settings.steps), initial=first_step, total=self.settings.steps,
            desc="rl", disable=not self.progress,
        )  # fmt: skip
        pending = None
        for step in bar:
            save = step % self.settings.checkpoint_every == 0 and step > first_step
            evaluate = step % self.settings.evaluation.every == 0
            if save or evaluate:
                self.write(self.read(pending), bar)
                pending = None
            if save:
                self.save(step, state)
            row = self.evaluate(state) if evaluate else {}
            packed, newest = self.sample_ahead(step, state)
            finished = self.read(pending)  # returns when the device turns to packing
            row["time/sync_s"] = seconds_until_ready(packed)
            sampling = time.perf_counter()
            self.write(finished, bar)  # while the device samples
            row |= self.wait_for_rollout(newest, sampling)
            batch, rewards = self.next_batch(step)
            dispatched = time.perf_counter()
            state, metrics = self.update(state, batch)
            pending = Pending(step, row | rewards, metrics, dispatched)
        self.write(self.read(pending), bar)
        return self.close(first_step, state, time.perf_counter() - started)

    # -- start ------------------------------------------------------------------------------------

    def restore_or_warm_up(self) -> tuple[int, TrainState]:
        """(first step, state): the newest checkpoint's, or a warmed-up model at step 0."""
        fresh = train_state.create(initial_params(self.settings), self.trainer.transformation)
        step = self.checkpoints.latest()
        if step is not None:
            state, self.key = self.checkpoints.restore_state(step, fresh)
            rollout = self.abstract_rollout(self.pack(fresh))
            queued = self.checkpoints.restore_queue(step, rollout)
            self.queue = RolloutQueue.from_list(queued, self.settings.rl.max_staleness)
            LOG.info("resumed at step %d", step)
            return step, state
        params = warm_up(self.settings, self.task, fresh.params, self.progress)
        state = train_state.create(params, self.trainer.transformation)
        self.save(0, state)
        return 0, state

    # -- one step ---------------------------------------------------------------------------------

    def pack(self, state: TrainState) -> dict:
        """The weights of a version as the rollout holds them."""
        return packing.pack_jit(state.params, self.settings.rollout_policy, self.settings.dtype)

    def sample(self, packed: dict, index: int, version: int) -> Rollout:
        """Rollout number `index`: prompts and draws depend on it alone, not on what ran before."""
        key = jax.random.fold_in(self.key, 1)
        return experience.sample(
            self.settings, self.task, self.sampler, packed, index, key, version
        )

    def abstract_rollout(self, packed: dict) -> Rollout:
        """Shapes and dtypes of this run's rollouts."""
        batch = self.settings.rollout.batch
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        prompts = ints(batch, self.settings.rollout.prompt_length)
        return jax.eval_shape(
            self.sampler, packed, prompts, ints(batch), self.key, ints(batch), 1.0, 0
        )

    def sample_ahead(self, step: int, state: TrainState) -> tuple[dict, Rollout]:
        """Dispatches rollouts until the queue is `staleness` ahead; the weights and the newest."""
        packed = self.pack(state)
        newest = None
        while len(self.queue) <= self.settings.rl.staleness:
            newest = self.sample(packed, step + len(self.queue), step)
            self.queue.put(newest)
        return packed, newest

    def wait_for_rollout(self, newest: Rollout, since: float) -> dict:
        """What sampling took since the device turned to it (seconds on `time.perf_counter`)."""
        tokens = float(jnp.sum(newest.mask_BT))
        seconds = time.perf_counter() - since
        return {"time/rollout_s": seconds, "rollout/tokens_per_s": tokens / seconds}

    def next_batch(self, step: int) -> tuple[TrainBatch, dict]:
        """The oldest rollout with its advantages, and its row of metrics."""
        rollout = self.queue.take(step)
        noise_key = jax.random.fold_in(jax.random.fold_in(self.key, 2), step)
        scored = experience.score(self.settings, self.task, rollout, step, noise_key)
        if step % self.settings.samples_every == 0:
            self.directory.write_rollouts(step, scored.samples)
        row = {
            "reward/mean": float(scored.reward_B.mean()),
            "reward/groups_kept": float(np.mean(scored.batch.keep_B)),
            "policy/staleness": step - int(rollout.version),
        }
        if rollout.guidance is not None:
            row["guidance/bytes_per_token"] = record.bytes_per_token(rollout.guidance)
        return scored.batch, row

    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict]:
        """The state one version on, and the first update's metrics."""
        unguided = dataclasses.replace(
            batch, rollout=dataclasses.replace(batch.rollout, guidance=None)
        )
        read = {True: batch, False: unguided}
        if self.settings.old_log_probs == "trainer":
            for guided in set(self.settings.guided[1:]):
                read[guided] = self.trainer.with_old_log_probs(state.params, read[guided])
        metrics = None
        for guided in self.settings.guided:
            state, this = self.trainer.update(state, read[guided])
            metrics = this if metrics is None else metrics | {"train/last_update": this}
        return dataclasses.replace(state, step=state.step + 1), metrics

    def read(self, pending: Pending | None) -> dict | None:
        """The row of a dispatched step, if there is one; waits for the device.

        Raises FloatingPointError for a loss or gradient that is not finite.
        """
        if pending is None:
            return None
        step, row, metrics, dispatched = pending
        last = metrics.pop("train/last_update", {})
        metrics = {name: float(value) for name, value in metrics.items()}
        for name in ("policy/importance_ratio", "policy/clipped_share"):
            if name in last:
                metrics[f"{name}_last_update"] = float(last[name])
        row = {"step": step} | dict.fromkeys(METRICS) | row | metrics
        row["time/train_s"] = time.perf_counter() - dispatched
        for name in ("train/loss", "train/grad_norm"):
            require_finite(name, step, row[name])
            require_finite(f"{name} of the last update", step, float(last.get(name, 0)))
        return row

    def write(self, row: dict | None, bar: tqdm.tqdm) -> None:
        """Writes the row of a step, if there is one, and shows it."""
        if row is None:
            return
        self.directory.append_metrics(row["step"], row)
        bar.set_postfix(
            reward=f"{row['reward/mean']:.2f}",
            gap=f"{row['mismatch/logp_abs_mean']:.1e}",
            tokens_per_s=f"{row['rollout/tokens_per_s']:.0f}",
        )

    # -- evaluation and end -----------------------------------------------------------------------

    def evaluate(self, state: TrainState) -> dict:
        """Greedy held-out accuracy as deployed (FP4, nothing to follow) and in BF16."""
        quantized = self.settings.quantized
        return {
            "eval/accuracy_fp4": accuracy(self.settings, self.task, state.params, quantized),
            "eval/accuracy_bf16": accuracy(self.settings, self.task, state.params, NOTHING),
        }

    def save(self, step: int, state: TrainState) -> None:
        """A checkpoint from which the run continues as if it had not stopped.

        Raises FloatingPointError, and leaves the last one alone, for parameters beyond all use.
        """
        require_finite("parameter norm", step, float(global_norm(state.params)))
        self.checkpoints.save(step, state, self.key, self.queue.to_list())

    def close(self, first_step: int, state: TrainState, seconds: float) -> dict:
        """Final evaluation, checkpoint, figure and summary."""
        steps = self.settings.steps
        final = self.evaluate(state)
        self.directory.append_metrics(steps, dict.fromkeys(METRICS) | final)
        if steps > first_step:
            self.save(steps, state)
        rows = read_metrics(self.directory.path)
        summary = {"seconds": seconds, "first_step": first_step, "steps": steps} | {
            f"{when}/{name.split('/')[1]}": row.get(name)
            for when, row in (("before", rows[0]), ("after", rows[-1]))
            for name in ("eval/accuracy_fp4", "eval/accuracy_bf16")
        }
        for name in ("mismatch/logp_abs_mean", "mismatch/code_rate", "reward/mean"):
            values = [row[name] for row in rows if row.get(name) is not None]
            summary[f"mean/{name}"] = float(np.mean(values)) if values else None
        self.directory.write_summary(summary)
        plots.plot_run(self.directory.path)
        return summary
