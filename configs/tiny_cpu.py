"""The whole of TRACE on a laptop CPU: a small Qwen3-style MoE learns running sums by GRPO.

    python -m experiments.rl --config=configs/tiny_cpu.py --workdir=runs/tiny
    python -m experiments.rl --config=configs/tiny_cpu.py --workdir=runs/qat --config.method=qat

The task: ten random digits and "=", to be answered with their running sums modulo 10; exact match.
"""

from ml_collections import ConfigDict

SIZES = dict(
    vocab_size=272,  # the byte tokenizer's
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=64,
    rope_theta=1e4,
    initializer_range=0.1,  # near 1 / sqrt(hidden_size): learns in 150 steps at any seed
)


def get_config(model: str | None = None) -> ConfigDict:
    """The default configuration; `configs/tiny_cpu.py:NAME` takes the sizes of a named model.

    Or an import of experiments.checkpoint, by its directory, with its parameters and tokenizer.
    """
    return ConfigDict(
        dict(
            method="trace",  # rl/methods.py lists them
            seed=0,
            steps=150,  # RL steps
            warmup_steps=250,  # supervised steps before them
            model=model or SIZES,  # a name of models/config.py, an import's directory, or sizes
            dtype="bfloat16",  # compute dtype of both sides
            task=dict(
                name="running_sum",
                train_size=20000,
                test_size=512,
                digits=10,
                dataset="",
                options={},
                path="",
                test_path="",
                reward="exact",
            ),
            # What FP4 means: ordered (site pattern, format), first match decides; see
            # guidance/policy.py.
            # The paper's sites are experts/* and attention/[kv]; here every linear layer is in FP4.
            quantize=(("*", "nvfp4"),),
            guidance=dict(
                encoding="",  # "" takes the method's; else one of guidance/encoding.py
                layers="all",  # "" takes the method's (the paper's latter_half for trace)
                sites=("attention/*", "experts/in"),  # recorded, where quantized
                audit_sequences=8,  # a rollout; full codes are kept of them, to measure mismatch
                check_rows=False,  # keep 16 bits a row, to count the rows that guidance restored
            ),
            rollout=dict(
                prompts=32,
                completions=8,  # a prompt
                prompt_length=11,  # tokens, room for the longest prompt
                max_new_tokens=11,
                temperature=1.0,
                top_p=1.0,  # draw from the most likely tokens that reach it; the trainer scores all
                top_k=0,  # draw from so many most likely tokens; 0: all
                unpack_once=True,  # hold FP4 weights unpacked while sampling (4x their bytes)
            ),
            rl=dict(
                learning_rate=3e-4,
                max_grad_norm=1.0,
                loss="",  # "" takes the method's; else grpo, gspo, tbpo (rl/losses.py)
                clip_low=0.2,
                clip_high=0.28,
                ratio_cap=5.0,  # on the importance ratio
                gspo_clip_low=3e-4,
                gspo_clip_high=4e-4,
                tbpo_low=0.8,  # of tbpo and trust_band; the paper's own are not known
                tbpo_high=1.28,
                # What is made of pi_old / pi_rollout (rl/corrections.py). "" takes the method's;
                # else none, tis, icepop, sequence_mask, trust_band, score_centering.
                correction="",
                tis_cap=2.0,  # 5.0 where the paper's bound is read as this cap
                icepop_low=0.5,
                icepop_high=5.0,
                sequence_mask_low=0.5,
                sequence_mask_high=2.0,
                head_tokens=64,  # recorded of each distribution, for score_centering
                drop_zero_variance=True,  # groups whose completions all scored alike
                updates_per_rollout=1,
                # Guidance is dropped after the first k updates on a rollout. Beyond one, a trainer
                # guided in all layers does not see its policy move: clipping cannot stop it.
                guided_updates=1,
                # What the importance ratio is taken to: "rollout", the policy that sampled, or
                # "trainer", the trainer before its first update on a rollout. "" takes the
                # latter under a correction, which needs it.
                old_log_probs="",
                staleness=0,  # versions by which rollouts run ahead of training
                max_staleness=3,
            ),
            warmup=dict(batch=128, learning_rate=3e-3),
            evaluation=dict(every=50, prompts=512),  # RL steps; held-out prompts, greedy
            checkpoint_every=50,  # RL steps
            samples_every=50,  # RL steps between files of sampled text
            mesh=dict(data=1, fsdp=1, expert=1, tensor=1),  # devices along each axis; one may be -1
            # Relative noise on the trainer's activations ahead of each quantizer: emulates the
            # kernels of another engine, since here both sides share one forward. 0 for none.
            engine_noise=0.005,
            debug_nans=False,  # raise at the first NaN, inside compiled code too
        )
    ).lock()  # a misspelt key fails where it is written
