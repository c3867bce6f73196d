"""Qwen3-MoE in plain numpy float64, one token, head and expert at a time (qwen.md 2.1 to 2.5)."""

import numpy as np


def norm(x, scale, eps):
    return scale * x / np.sqrt(np.mean(x * x) + eps)


def rotate(x, position, theta):
    half = len(x) // 2
    angle = position * theta ** (-2 * np.arange(half) / len(x))
    rotated = np.concatenate([-x[half:], x[:half]])  # "rotate_half"
    return x * np.tile(np.cos(angle), 2) + rotated * np.tile(np.sin(angle), 2)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / np.sum(e)


def attention(x_TD, p, cfg):
    tokens, size, shared = len(x_TD), cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    heads = lambda w: (x_TD @ w.T).reshape(tokens, -1, size)
    q_THC, k_TKC, v_TKC = heads(p["q"]), heads(p["k"]), heads(p["v"])
    out = np.zeros((tokens, cfg.num_heads, size))
    place = lambda x, scale, t: rotate(norm(x, scale["scale"], cfg.rms_norm_eps), t, cfg.rope_theta)
    for t, h in np.ndindex(tokens, cfg.num_heads):
        q = place(q_THC[t, h], p["q_norm"], t)
        k_SC = np.stack([place(k_TKC[s, h // shared], p["k_norm"], s) for s in range(t + 1)])
        out[t, h] = softmax(k_SC @ q / np.sqrt(size)) @ v_TKC[: t + 1, h // shared]
    return out.reshape(tokens, -1) @ p["o"].T


def moe(x, p, cfg):
    probability = softmax(p["router"] @ x)
    chosen = np.argsort(-probability, kind="stable")[: cfg.num_experts_per_token]
    weight = probability[chosen]
    if cfg.norm_topk_prob:
        weight = weight / weight.sum()
    y = np.zeros_like(x)
    for e, w in zip(chosen, weight, strict=True):
        gate, up = np.split(p["gate_up"][e] @ x, 2)
        y += w * (p["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return y, chosen


def forward(params, tokens_T, cfg):
    """(logits [T, V], chosen experts [L, T, A]) of one sequence."""
    x_TD = params["embed"][tokens_T]
    routes = []
    for layer in range(cfg.num_layers):
        p = _at(params["layers_0"]["0"], layer)
        normed = [norm(x, p["input_norm"]["scale"], cfg.rms_norm_eps) for x in x_TD]
        x_TD = x_TD + attention(np.stack(normed), p["attention"], cfg)
        normed = [norm(x, p["post_attention_norm"]["scale"], cfg.rms_norm_eps) for x in x_TD]
        y_TD, chosen = zip(*[moe(x, p["experts"], cfg) for x in normed], strict=True)
        x_TD = x_TD + np.stack(y_TD)
        routes.append(chosen)
    normed = [norm(x, params["final_norm"]["scale"], cfg.rms_norm_eps) for x in x_TD]
    return np.stack(normed) @ params["head"].T, np.array(routes)


def _at(tree, layer):
    return {k: _at(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}
