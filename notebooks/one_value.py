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
# # One value's way through rollout and training
#
# The rollout computes an activation, rounds it, and keeps one bit. The trainer computes it again,
# a little differently, and rounds it as that bit says. Then a whole matrix of values, and what each
# encoding restores of it.

# %%
import sys

sys.path.insert(0, "..")  # the repository, where the package is not installed

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from trace_jax.formats import block_scaled, e2m1, nvfp4
from trace_jax.guidance import encoding, quantizer

BLUE, VERMILLION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"

# %% [markdown]
# ## In the rollout
#
# 60.24, in a block whose largest value is 144, so that the block scale is 144 / 6 = 24. (The outer
# scale is set to 1 here, to keep the numbers readable.)

# %%
ours = jnp.array([60.24, 144.0] + [0.0] * 14)
q = nvfp4.quantize(ours, outer=jnp.float32(1))
guide = quantizer.encode(q, "low1")  # what the rollout keeps
code = int(block_scaled.unpack(q)[0])
print(f"60.24 / {float(q.scales[0]):.0f} = {60.24 / float(q.scales[0]):.2f} -> code {code:03b}")
print(f"kept: low bit {code & 1}, and the block's scale {float(guide.scales[0]):.0f}")
print(f"read by the next product: {float(nvfp4.dequantize(q)[0]):.0f}")

# %% [markdown]
# ## In training
#
# The trainer's kernels sum in another order and arrive at 59.76, which is 2.49 in units of the
# scale. Rounded to nearest that is 2. But the two grid points around 2.49 are 2, whose code is
# even, and 3, whose code is odd; the recorded bit is odd.

# %%
theirs = ours.at[0].set(59.76)
z = theirs[0] / guide.scales[0].astype(jnp.float32)
low, high = e2m1.bracket(z)
nearest = quantizer.fake_quantize(theirs, outer=jnp.float32(1))
guided = quantizer.quantize_guided(theirs, guide)
print(f"bracket of {float(z):.2f}: codes {int(low):03b} and {int(high):03b}")
print(f"to nearest {float(nearest[0]):.0f}, guided {float(guided[0]):.0f}")

# %%
figure, axes = plt.subplots(figsize=(5.6, 2.4), layout="constrained")
axes.axhline(0, color=GREY, linewidth=0.8)
for point, value in enumerate(e2m1.GRID[:7]):
    color = BLUE if point & 1 else VERMILLION
    axes.plot(value, 0, "s" if point & 1 else "o", color=color, markersize=7)
    axes.text(value, -0.55, f"{value:g}\n{point:03b}", ha="center", va="top", fontsize=8)
axes.plot([], [], "o", color=VERMILLION, label="low bit 0")
axes.plot([], [], "s", color=BLUE, label="low bit 1")
axes.axvspan(2, 3, ymin=0.42, ymax=0.62, color=GREY, alpha=0.25, linewidth=0)
axes.plot([2.5, 2.5], [-0.4, 0.4], color="black", linewidth=0.8, linestyle=(0, (2, 2)))
for start, end, height, color, text in (
    (2.51, 3, 1.5, BLUE, "rollout 2.51"),
    (2.49, 2, 1.5, VERMILLION, "trainer 2.49, nearest"),
):
    axes.annotate(
        "",
        (end, 0.2),
        (start, height),
        arrowprops=dict(arrowstyle="->", color=color, linewidth=1.4),
    )
    side = dict(ha="left") if end > start else dict(ha="right")
    axes.text(start + (0.1 if end > start else -0.1), height, text, color=color, fontsize=8, **side)
axes.set(
    title="The trainer's bracket, and the bit that decides",
    xlabel="value / block scale; below each grid point its code",
    xlim=(-0.3, 4.5),
    ylim=(-1.5, 2.2),
    yticks=[],
)
axes.tick_params(labelbottom=False, bottom=False)
axes.spines[["left", "top", "right", "bottom"]].set_visible(False)
axes.legend(frameon=False, fontsize=8, loc="upper left")
plt.show()

# %% [markdown]
# ## Backward
#
# A step has a gradient of zero nearly everywhere. Both roundings therefore pass the gradient on as
# if they were the identity (straight through); the guide gets none.

# %%
weight = jnp.linspace(1, 2, 16)
gradient = jax.grad(lambda x: jnp.sum(weight * quantizer.quantize_guided(x, guide)))(theirs)
print("equal to the gradient of the plain product:", bool((gradient == weight).all()))

# %% [markdown]
# ## Rows of values, and noise
#
# 64 rows of 512 values; the trainer's copy has noise relative to each value, as another engine's
# kernels would. The share of codes that differ from the rollout's, rounding to nearest and under
# three encodings. Codes cost 4.5 bits a value, the low bit 1.5, the syndrome 0.3.

# %%
x = jax.random.normal(jax.random.key(0), (64, 512))
q = nvfp4.quantize(x, outer="row")
draw = jax.random.normal(jax.random.key(1), x.shape)
noises = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1])


def differing(rounded):
    return float(jnp.mean(block_scaled.unpack(rounded) != block_scaled.unpack(q)))


shares = {"nearest": [differing(nvfp4.quantize(x * (1 + s * draw), outer="row")) for s in noises]}
for name in ("low1", "codes", "syndrome"):
    guide = quantizer.encode(q, name)
    rounding = jax.jit(lambda t, guide=guide: quantizer.round_guided(t, guide)[0])
    shares[name] = [differing(rounding(x * (1 + s * draw))) for s in noises]
    bits = 8 * encoding.row_bytes(name, 512, "nvfp4") / 512
    print(f"{name:9s}{bits:6.3f} bits a value", *(f"{share:9.5f}" for share in shares[name]))
print(f"{'nearest':9s}{0:6.3f} bits a value", *(f"{share:9.5f}" for share in shares["nearest"]))

# %%
looks = {
    "nearest": (VERMILLION, "o-"),
    "syndrome": ("#CC79A7", "^-"),
    "low1": (BLUE, "s--"),
    "codes": (GREEN, "d:"),
}
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for name, (color, style) in looks.items():
    axes.plot(100 * noises, shares[name], style, color=color, markersize=4, label=name)
axes.set_xscale("log")
axes.set_yscale("symlog", linthresh=1e-5)
axes.set_xticks(100 * noises, [f"{100 * noise:g}" for noise in noises], minor=False)
axes.minorticks_off()
axes.set(
    title="Codes that differ from the rollout's",
    xlabel="noise (% of each value)",
    ylabel="share of codes",
    ylim=(-3e-6, 1),
)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The syndrome restores what BF16 rounding disturbs (0.2 to 1%) and gives out beyond. The low bit
# and the full code reach further, and lose the same values here: those that moved by more than a
# code, out of the trainer's bracket. There the full code still takes the neighbour that is nearer.
