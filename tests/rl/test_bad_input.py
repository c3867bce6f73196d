"""Bad input stops a run with one message that names key, value and fix, before any work."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from tests.rl import tiny_run
from trace_jax.models import checkpoint_hf, decoder
from trace_jax.rl import run, settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
EIGHT = {"mesh.data": 4, "mesh.fsdp": 2}  # what fits the tests' devices

REFUSED = [  # (overrides, what the message must hold)
    ({"method": "grpo"}, "method='grpo' is unknown: choose one of ['bf16'"),
    ({"dtype": "float16"}, "config.dtype='float16': choose 'bfloat16' or 'float32'"),
    ({"seed": -1}, "config.seed=-1: must be finite and above -1"),
    ({"steps": -1}, "config.steps=-1"),
    ({"checkpoint_every": 0}, "config.checkpoint_every=0: must be finite and above 0"),
    ({"evaluation.every": 0}, "config.evaluation.every=0: must"),
    ({"samples_every": 0}, "config.samples_every=0: must"),
    ({"engine_noise": 1.5}, "config.engine_noise=1.5: lies in [0, 1)"),
    # Formats and sites.
    ({"quantize": (("*", "nvfp8"),)}, "config.quantize: unknown format 'nvfp8': choose one of"),
    (
        {"quantize": (("expert/*", "nvfp4"),)},
        "config.quantize: site pattern 'expert/*' matches nothing; sites: attention/in, ",
    ),
    ({"quantize": (("expert/*", "nvfp4"),)}, "closest: 'experts/"),
    (
        {"guidance.sites": ("attention/q",)},
        "config.guidance: site pattern 'attention/q' matches nothing",
    ),
    ({"quantize": (("experts/*", "nvfp4"),)}, "pattern 'attention/*' matches nothing; sites: exp"),
    ({"guidance.sites": ()}, "config.guidance.sites=(): name one site pattern or more"),
    ({"guidance.encoding": "low3"}, "config.guidance: unknown guidance encoding 'low3': choose"),
    (
        {"quantize": (("*", "nvfp4_4over6"),), "guidance.encoding": "syndrome"},
        "config.guidance: guidance encoding 'syndrome' does not serve nvfp4_4over6: the parity of",
    ),
    (
        {
            "quantize": (("attention/[kv]", "bf16"), ("*", "mxfp4_w4a8")),
            "method": "trace_syndrome",
        },
        "config.guidance: guidance encoding 'syndrome' does not serve mxfp8: of E4M3's fine codes",
    ),
    ({"quantize": (("*", "mxfp4_w4a8"),)}, "config.model.head_dim=16: site attention/k is mxfp4,"),
    ({"guidance.layers": "upper"}, "guidance.layers='upper': choose one of ['all'"),
    ({"guidance.layers": "latter_eighth"}, "of 2 layers has none of attention/in"),
    ({"guidance.audit_sequences": 17}, "config.guidance.audit_sequences=17: a rollout has 16"),
    # Widths.
    (
        {"model.hidden_size": 40},
        "config.model.hidden_size=40: site attention/in is nvfp4, whose blocks of 16 must divide "
        "it; take 48, or set ('attention/in', 'bf16') first in quantize",
    ),
    ({"model.head_dim": 24}, "config.model.head_dim=24: site attention/k is nvfp4"),
    ({"model.moe_intermediate_size": 24}, "config.model.moe_intermediate_size=24: site exp"),
    ({"quantize": (("*", "mxfp4"),)}, "config.model.head_dim=16: site attention/k is mxfp4, whose"),
    ({"method": "bf16", "model.hidden_size": 40}, "config.model.hidden_size=40"),  # evaluated
    ({"model.num_heads": 3, "model.num_kv_heads": 2}, "model.num_heads=3 is not a multiple of"),
    ({"model.num_experts_per_token": 5}, "model.num_experts_per_token=5 exceeds"),
    ({"model.vocab_size": 256}, "config.model.vocab_size=256 is below the tokenizer's 272; raise"),
    # Lengths and sizes of the task.
    ({"rollout.prompt_length": 2}, "rollout.prompt_length=2, but a prompt of the task has 3 tok"),
    ({"rollout.max_new_tokens": 2}, "rollout.max_new_tokens=2, but 72 of 72 answers"),
    ({"evaluation.prompts": 16}, "evaluation on 16 prompts, but the task has 8; fix: raise"),
    ({"task.train_size": 1000}, "task.train_size=1000, but the task has"),
    ({"task.name": "sums"}, "task.name='sums' is unknown; fix: choose one of"),
    ({"task.reward": "kind"}, "kind"),
    ({"task.name": "jsonl", "task.path": "no/such.jsonl"}, "task.path='no/such.jsonl' is not a"),
    # The learner.
    ({"rollout.completions": 1}, "config.rollout.completions=1: must be finite and above 1"),
    ({"rollout.temperature": 0.0}, "config.rollout.temperature=0.0: must be finite and above 0"),
    ({"rollout.top_p": 0.0}, "config.rollout.top_p=0.0: lies in (0, 1]; 1 keeps all"),
    ({"rollout.top_p": 1.5}, "config.rollout.top_p=1.5: lies in (0, 1]"),
    ({"rollout.top_k": -1}, "config.rollout.top_k=-1: must be a whole number of tokens, 0 for all"),
    ({"rl.learning_rate": float("inf")}, "config.rl.learning_rate=inf: must be finite"),
    ({"rl.updates_per_rollout": 0}, "config.rl.updates_per_rollout=0: must"),
    ({"rl.clip_low": 1.0}, "config.rl.clip_low=1.0: must lie in (0, 1)"),
    ({"rl.ratio_cap": 1.2}, "config.rl.ratio_cap=1.2: must exceed 1 + rl.clip_high = 1.28"),
    ({"rl.old_log_probs": "old"}, "config.rl.old_log_probs='old': choose one of ('rollout', 'tr"),
    (
        {"rl.correction": "tis", "rl.old_log_probs": "rollout"},
        "config.rl.old_log_probs='rollout': correction 'tis' compares the trainer's own with the "
        "rollout's; set 'trainer', or rl.correction='none'",
    ),
    ({"method": "qarl", "rl.old_log_probs": "rollout"}, "correction 'trust_band' compares"),
    ({"rl.loss": "ppo"}, "config.rl: loss='ppo' is unknown: choose one of ['grpo', 'gspo', 'tb"),
    ({"rl.correction": "tsi"}, "config.rl: correction='tsi' is unknown: choose one of ['icepop'"),
    ({"rl.tis_cap": 0.5}, "config.rl.tis_cap=0.5: must be 1 or more"),
    ({"rl.gspo_clip_low": 0.0}, "config.rl.gspo_clip_low=0.0: must lie in (0, 1)"),
    ({"rl.gspo_clip_high": 0.0}, "config.rl.gspo_clip_high=0.0: must be finite and above 0"),
    ({"rl.icepop_low": 1.5}, "config.rl.icepop_low=1.5: must lie in [0, 1)"),
    ({"rl.tbpo_high": 1.0}, "config.rl.tbpo_high=1.0: must exceed 1"),
    ({"rl.sequence_mask_low": -0.5}, "config.rl.sequence_mask_low=-0.5: must lie in [0, 1)"),
    (
        {"method": "score_centering", "rl.head_tokens": 273},
        "config.rl.head_tokens=273: the vocabulary has 272",
    ),
    ({"rl.staleness": 4}, "config.rl.staleness=4: must lie between 0 and rl.max_staleness=3"),
    ({"warmup.learning_rate": -1.0}, "config.warmup.learning_rate=-1.0: must"),
    # The mesh.
    ({"mesh.data": 3, "mesh.fsdp": 1}, "'data': 3, "),
    ({"mesh.data": 3, "mesh.fsdp": 1}, "needs 3 devices, there are 8; set one axis to -1 or"),
    ({"mesh.data": 1, "mesh.fsdp": 8}, "axis 'embed' of size 32 does not split over mesh axis"),
    (
        {"rollout.prompts": 3},
        "config.rollout.prompts * config.rollout.completions=12: must be a multiple of "
        "mesh.data * mesh.fsdp * mesh.expert = 8",
    ),
    ({"warmup.batch": 12}, "config.warmup.batch=12: must be a multiple of"),
    ({"evaluation.prompts": 4}, "config.evaluation.prompts=4: must be a multiple of"),
]


@pytest.fixture
def idle(monkeypatch):
    """A run that gets past its checks has failed."""

    def begin(*arguments):
        raise AssertionError("the run began")

    monkeypatch.setattr(run, "Loop", begin)


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refused_before_any_work(idle, tmp_path, overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        tiny_run.go(tmp_path / "run", EIGHT | overrides)
    assert not (tmp_path / "run").exists()


def test_what_is_refused_differs_from_what_is_not(idle, tmp_path):
    with pytest.raises(AssertionError, match="the run began"):
        tiny_run.go(tmp_path / "run", EIGHT)


@pytest.mark.parametrize("row", [{"question": "1+1="}, {"question": "1+1=", "answer": ""}])
def test_a_jsonl_row_without_an_answer_is_refused(idle, tmp_path, row):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "1+2=", "answer": "3"}\n' + json.dumps(row) + "\n")
    task = {"task.name": "jsonl", "task.path": str(path), "task.train_size": 1}
    with pytest.raises(ValueError, match=r"questions.jsonl, line 2: no answer; keys present"):
        tiny_run.go(tmp_path / "run", EIGHT | task)


def test_a_solution_that_a_warm_up_could_not_hold_is_refused(idle, tmp_path):
    rows = [{"question": f"{i}", "answer": f"because, #### {i}"} for i in range(10, 99)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = EIGHT | {"task.name": "jsonl", "task.path": str(path)}
    with pytest.raises(ValueError, match=r"prompt_length \+ rollout.max_new_tokens = 6, but.*=0$"):
        tiny_run.go(tmp_path / "run", task)
    with pytest.raises(AssertionError, match="the run began"):
        tiny_run.go(tmp_path / "run", task | {"warmup_steps": 0})


def test_keys_that_no_section_has():
    plain = json.loads(tiny_run.config().to_json())
    with pytest.raises(ValueError, match=r"config: missing \['steps'\], unknown \['stepz'\]"):
        settings.resolve({**{k: v for k, v in plain.items() if k != "steps"}, "stepz": 3})
    plain["rl"]["learning_rte"] = plain["rl"].pop("learning_rate")
    message = r"config.rl: missing \['learning_rate'\], unknown \['learning_rte'\]; its fields"
    with pytest.raises(ValueError, match=message):
        settings.resolve(plain)
    unknown = r"model='qwen9': no such directory.*choose one of \['qwen3_235b"
    with pytest.raises(ValueError, match=unknown):
        settings.resolve(plain | {"model": "qwen9"})


# -- from the command line -------------------------------------------------------------------------

LINES = [  # (experiment, arguments, what stderr must hold)
    ("rl", ["--config.stepz=3"], "error: unknown key in --config: 'stepz' Did you mean \"steps\""),
    (
        "rl",
        ["--config=configs/mismatch.py", "--config.rollout.promts=3"],
        "error: unknown key in --config: 'promts' Did you mean \"prompts\"",
    ),
    ("rl", ["--config.rollout.prompts=2.5"], "flag --config.rollout.prompts=2.5: invalid literal"),
    ("rl", ["--config=configs/no_such.py"], "configs/no_such.py"),
    ("rl", ["--config.method=grpo"], "error: method='grpo' is unknown: choose one of"),
    ("mismatch", ["--config.model.head_dim=24"], "error: config.model.head_dim=24: site attent"),
    ("evaluate", [], "error: no checkpoint in "),
]


@pytest.mark.slow
def test_the_command_line_prints_one_message_and_fails(tmp_path):
    environment = os.environ | {"XLA_FLAGS": ""}
    commands = [
        [sys.executable, "-m", f"experiments.{name}", f"--workdir={tmp_path / 'run'}", *arguments]
        for name, arguments, _ in LINES
    ]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for two in range(0, len(LINES), 2):  # at a time: as many as there are cores
        running = [
            subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
            for command in commands[two : two + 2]
        ]
        for process, (_, _, message) in zip(running, LINES[two : two + 2], strict=False):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 1
            assert message in err
            assert "Traceback" not in err
            assert out == ""


def test_an_import_without_its_tokenizer_is_not_read_as_bytes(tmp_path):
    config = tiny_run.config().unlock()
    cfg = dataclasses.replace(settings.resolve(config).cfg, vocab_size=304)
    checkpoint_hf.import_params(decoder.init(cfg, jax.random.key(0)), cfg, tmp_path / "imported")
    del config["model"]
    config["model"] = f"{tmp_path / 'imported'}"
    with pytest.raises(ValueError, match=r"no tokenizer\.json, and a vocabulary of 304"):
        settings.resolve(config)
