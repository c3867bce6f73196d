# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a run
#
# What a run directory holds, and what healthy and alarming curves look like. The numbers here are
# **made up**, so that this takes seconds; set `workdir` to a run of your own to read that
# (`python -m experiments.rl --workdir=runs/tiny` from the repository). docs/metrics.md defines
# every metric.

# %%
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, "..")  # the repository, where the package is not installed

import numpy as np
from IPython.display import Image, display

from trace_jax.analysis import plots, run_directory
from trace_jax.analysis.run_directory import RunDirectory

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two made-up runs
#
# One as under guidance: rollout and trainer agree to float32 resolution, reward rises. One as of a
# BF16 trainer under FP4 rollouts: the gap grows, and accuracy falls from where warm-up left it.


# %%
def make_run(method, reward_after, gap, codes, seed=0, steps=100):
    rng = np.random.default_rng(seed)
    workdir = folder / method
    with RunDirectory(workdir) as run:
        run.write_config({"method": method})
        for step in range(steps + 1):
            done = step / steps
            level = 0.6 + (reward_after - 0.6) * done
            row = {
                "reward/mean": np.clip(level + 0.05 * rng.normal(), 0, 1),
                "mismatch/logp_abs_mean": gap(done) * np.exp(0.2 * rng.normal()),
                "mismatch/logp_abs_max": 40 * gap(done) * np.exp(0.4 * rng.normal()),
                "mismatch/code_rate": codes,
            }
            if step % 20 == 0:
                row |= {"eval/accuracy_fp4": level, "eval/accuracy_bf16": level + 0.1}
            run.append_metrics(step, row)
        sample = {"prompt": "12=", "answer": "13", "completion": "13", "reward": 1.0}
        run.write_rollouts(0, [sample, sample | {"completion": "12", "reward": 0.0}])
        run.write_summary({"steps": steps, "after/accuracy_fp4": level})
    return workdir


healthy = make_run("trace", 0.85, lambda done: 5e-8, 0.0)
alarming = make_run("fp4_rollout", 0.35, lambda done: 0.05 * 10**done, 0.45)
workdir = healthy

# %% [markdown]
# ## The files
#
# `metrics.jsonl` has one object a step and is the source of truth; a value that a step or a method
# lacks is null or absent. `curve` takes one metric out of the rows.

# %%
print(sorted(path.name for path in workdir.iterdir()))
rows = run_directory.read_metrics(workdir)
print(f"{len(rows)} rows; the first:")
for name, value in rows[0].items():
    print(f"  {name:26s}{value:.3g}")
steps, accuracy = plots.curve(rows, "eval/accuracy_fp4")
print("FP4 accuracy, by step:", dict(zip(steps.tolist(), accuracy.round(2).tolist(), strict=True)))
print("summary:", run_directory.read_summary(workdir))

# %% [markdown]
# Sampled text, a file each `samples_every` steps. Read it before believing a reward.

# %%
for row in run_directory.read_rollouts(workdir, step=0):
    print(row)

# %% [markdown]
# ## A healthy run
#
# Reward rises above its noise, FP4 accuracy (what would be deployed) stays above the dashed line
# of the warm-up, and under guidance the gap lies at float32 resolution and stays there.

# %%
display(Image(plots.plot_run(healthy), width=760))

# %% [markdown]
# ## An alarming one
#
# A gap that grows step by step, by orders of magnitude above BF16's own (0.001 to 0.003 nats,
# docs/results.md section 1), while FP4 accuracy falls below the warm-up's.

# %%
display(Image(plots.plot_run(alarming), width=760))

# %% [markdown]
# ## Methods side by side
#
# Give each method its run directories, one a seed.

# %%
runs = {"trace": [healthy], "fp4_rollout": [alarming]}
display(Image(plots.plot_comparison(runs, folder / "methods.png"), width=760))

# %% [markdown]
# ## A first look, in words
#
# The same judgement from the numbers, for a run that nobody looks at.

# %%
for workdir in (healthy, alarming):
    rows = run_directory.read_metrics(workdir)
    _, gap = plots.curve(rows, "mismatch/logp_abs_mean")
    _, accuracy = plots.curve(rows, "eval/accuracy_fp4")
    tenth = len(gap) // 10
    print(
        f"{workdir.name:12s} gap {np.median(gap[:tenth]):.1e} -> "
        f"{np.median(gap[-tenth:]):.1e} nats, FP4 accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}"
    )
