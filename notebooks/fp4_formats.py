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
# # Four bits a number
#
# What the FP4 formats can hold, what they lose, and why two computations that agree to five digits
# may still round to different numbers. The last part is the problem that TRACE solves, and shows
# its remedy: one recorded bit.

# %%
import sys

sys.path.insert(0, "..")  # the repository, where the package is not installed

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from trace_jax.formats import e2m1, mxfp4, nvfp4
from trace_jax.guidance import quantizer

# %% [markdown]
# ## The grid
#
# E2M1 has a sign, two exponent bits and one mantissa bit: sixteen codes, fifteen different values
# (a zero is always code 0). The spacing doubles at 2 and at 4. Neighbours always differ in the low
# bit of their code; remember that.

# %%
for code in range(8):
    value = e2m1.decode(jnp.uint8(code))
    print(f"code {code:2d} = {code:04b} -> {float(value):3.1f}     low bit {code & 1}")

# %% [markdown]
# A value goes to the nearest grid point; a value midway goes to the even code; beyond 6 it
# saturates. Each step of the stair is a *rounding cell*, and its edges, the midpoints, are where
# things go wrong.

# %%
z = jnp.linspace(-7, 7, 2801)
midpoints = (e2m1.GRID[:-1] + e2m1.GRID[1:]) / 2
ties = e2m1.decode(e2m1.encode(jnp.asarray(midpoints)))

figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.plot(z, z, color="#BBBBBB", linewidth=0.8, label="no rounding")
axes.plot(z, e2m1.decode(e2m1.encode(z)), color="#0072B2", label="E2M1")
axes.plot(midpoints, ties, "o", color="#D55E00", markersize=4, label="ties go to the even code")
axes.set(title="Rounding to E2M1", xlabel="value", ylabel="rounded value")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Blocks
#
# Fifteen values are few, so neighbours share a scale. **NVFP4** gives every 16 values a scale of
# eight bits (E4M3) and every row (activations) or matrix (weights) a float32 *outer* scale that
# brings the block scales into E4M3's range: value = code × block scale × outer scale, at
# 4 + 8/16 = 4.5 bits a value. **MXFP4** gives every 32 values a power of two (E8M0) and has no
# outer scale: 4.25 bits.

# %%
x = jax.random.normal(jax.random.key(0), (64, 1024)) * jnp.linspace(0.2, 3, 1024)
q = nvfp4.quantize(x, outer="row")
print(f"codes  {q.codes.dtype} {q.codes.shape}, two in a byte")
print(f"scales {q.scales.dtype} {q.scales.shape}, one for 16 values")
print(f"outer  {q.outer.dtype} {q.outer.shape}, one for a row")
print("first block    ", np.asarray(x[0, :16]).round(2))
print("as code values ", np.asarray(e2m1.decode(e2m1.unpack_bits(q.codes, 4)))[0, :16])
print("scale and outer", float(q.scales[0, 0]), float(q.outer[0]))
print("dequantized    ", np.asarray(nvfp4.dequantize(q))[0, :16].round(2))

# %% [markdown]
# The finer scale of NVFP4 is worth its quarter of a bit. What is lost, relative to the data:

# %%
dequantized = {
    "NVFP4": nvfp4.dequantize(q),
    "MXFP4": mxfp4.dequantize(mxfp4.quantize(x, "mxfp4")),
    "MXFP4, scales rounded down": mxfp4.dequantize(mxfp4.quantize(x, "mxfp4_floor")),
}
for name, y in dequantized.items():
    print(f"{name:28s}{float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x)):.4f}")

# %% [markdown]
# ## 2.49 is 2 and 2.51 is 3
#
# In reinforcement learning two programs compute the same activation: the *rollout*, which sampled
# the text, and the *trainer*, which learns from it. They sum in another order, so their results
# differ a little. Here one has 60.24 and the other 59.76, in a block whose scale is 24.

# %%
rollout = jnp.array([60.24, 144.0] + [0.0] * 14)
trainer = jnp.array([59.76, 144.0] + [0.0] * 14)
q_rollout = nvfp4.quantize(rollout, outer=jnp.float32(1))
q_trainer = nvfp4.quantize(trainer, outer=jnp.float32(1))

print("block scale", float(q_rollout.scales[0]))
for name, values, quantized in (("rollout", rollout, q_rollout), ("trainer", trainer, q_trainer)):
    code = int(e2m1.unpack_bits(quantized.codes, 4)[0])
    print(
        f"{name}: {values[0]:.2f} / 24 = {values[0] / 24:.2f} -> "
        f"{float(e2m1.decode(jnp.uint8(code)))} (code {code:04b}) -> "
        f"{float(nvfp4.dequantize(quantized)[0])}"
    )

# %% [markdown]
# A gap of 0.48 became one of 24: fifty times larger, because 2.5 is the edge of a cell.
#
# **The remedy.** The rollout keeps the low bit of each code (here 1, for 3) and the scales. The
# trainer takes the two grid points around its own 2.49, which are 2 (low bit 0) and 3 (low bit 1),
# and picks the one whose low bit matches. The gradient passes straight through.

# %%
guide = quantizer.encode(q_rollout, "low1")
guided = quantizer.quantize_guided(trainer, guide)
print(f"trainer, guided: {trainer[0]:.2f} -> {float(guided[0])}")
print("equal to the rollout:", bool((guided == nvfp4.dequantize(q_rollout)).all()))
print("gradient:", jax.grad(lambda t: quantizer.quantize_guided(t, guide)[0])(trainer)[0])

# %% [markdown]
# ## Many values, growing drift
#
# The same for 65,536 values, the trainer's drifting from the rollout's by a growing share of their
# mean size. Rounding to nearest magnifies small drifts; guided by one bit a value it removes them,
# and only where values drift by about a cell does the full code (4 bits) do better.

# %%
q_rollout = nvfp4.quantize(x, outer="row")
target = nvfp4.dequantize(q_rollout)
noise = jax.random.normal(jax.random.key(1), x.shape) * jnp.abs(x).mean()
drifts = 2.0 ** np.arange(-9, -1)
roundings = {"nearest": lambda t: quantizer.fake_quantize(t, fmt="nvfp4", outer="row")}
for encoding in ("low1", "low2", "codes"):
    guide = quantizer.encode(q_rollout, encoding)
    roundings[encoding] = lambda t, guide=guide: quantizer.quantize_guided(t, guide)

figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
colors = ("#D55E00", "#0072B2", "#E69F00", "#009E73")
print("drift   ", *(f"{drift:6.3f}" for drift in drifts))
for (name, rounding), color in zip(roundings.items(), colors, strict=True):
    gaps = [
        float(jnp.linalg.norm(rounding(x + d * noise) - target) / jnp.linalg.norm(d * noise))
        for d in drifts
    ]
    print(f"{name:8s}", *(f"{gap:6.2f}" for gap in gaps))
    axes.plot(drifts, gaps, "o-", markersize=3, color=color, label=name)
axes.set_xscale("log", base=2)
axes.set(
    title="What rounding makes of a drift",
    xlabel="drift, as a share of the mean magnitude",
    ylabel="gap after rounding / gap before",
)
axes.legend(frameon=False)
plt.show()
