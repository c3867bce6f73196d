"""The start of a run: parameters from the seed, and supervised training on the task's answers."""

import functools
from pathlib import Path

import jax
import tqdm

from trace_jax.models import checkpoint_hf, config, decoder, packing
from trace_jax.rl import batches
from trace_jax.rl.evaluation import on_mesh
from trace_jax.rl.settings import Settings, require_finite
from trace_jax.rl.tasks import Task
from trace_jax.training import state as train_state
from trace_jax.training.checkpoint import Checkpoints

HOST_TABLE_BYTES = 2**31  # n-gram tables above this stay in host memory, mapped and not trained


def initial_params(settings: Settings) -> dict:
    """Float32 masters, drawn from the seed or as an import holds them, on the mesh in context."""
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    init = functools.partial(decoder.init, settings.cfg)
    shapes, mesh = jax.eval_shape(init, key), jax.sharding.get_mesh()
    shardings = train_state.parameter_shardings(settings.cfg, shapes, mesh)
    if settings.source is None:
        return jax.jit(init, out_shardings=shardings)(key)
    on_host = 4 * config.ngram_table_parameters(settings.cfg) > HOST_TABLE_BYTES
    params, _ = checkpoint_hf.load_imported(settings.source, shardings, host_table=on_host)
    return packing.masters(params)


def warm_up(settings: Settings, task: Task, params: dict, progress: bool) -> dict:
    """Parameters after `warmup_steps` of supervised training; unquantized, whatever the method.

    Raises FloatingPointError when the loss is not finite.
    """
    trainer = settings.warm_up()
    state = train_state.create(params, trainer.transformation)
    length = settings.rollout.prompt_length + settings.rollout.max_new_tokens
    bar = tqdm.trange(settings.warmup_steps, desc="warm-up", disable=not progress)
    for step in bar:
        batch = batches.supervised_batch(
            task, settings.tokenizer, step, settings.warmup.batch, length, settings.seed
        )
        state, loss = trainer.update(state, *on_mesh(batch))
        if step % 50 == 0 or step + 1 == settings.warmup_steps:
            require_finite("warm-up loss", step, float(loss))
            bar.set_postfix(loss=f"{float(loss):.3f}")
    return state.params


def newest_params(settings: Settings, checkpoints: str | Path) -> tuple[int, dict]:
    """(step, parameters) of the newest checkpoint of a run.

    Raises FileNotFoundError where there is none, ValueError where it is of another shape.
    """
    store = Checkpoints(checkpoints)
    try:
        step = store.latest()
        if step is None:
            raise FileNotFoundError(
                f"no checkpoint in {checkpoints}; train one with experiments.rl and this --workdir"
            )
        fresh = train_state.create(initial_params(settings), settings.trainer().transformation)
        return step, store.restore_state(step, fresh)[0].params
    finally:
        store.close()


def trained_params(settings: Settings, task: Task, checkpoints: str | Path) -> dict:
    """Parameters of a run's newest checkpoint or, where there is none, of a warmed-up model."""
    try:
        return newest_params(settings, checkpoints)[1]
    except FileNotFoundError:
        return warm_up(settings, task, initial_params(settings), progress=True)
