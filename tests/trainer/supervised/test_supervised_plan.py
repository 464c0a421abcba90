"""The plan of supervised runs: batches and bytes by hand, the commands that show it, and the measured memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiny_model import tiny_qwen2
from tests.trainer.prompt_rows import write
from tests.trainer.supervised.test_replay import PAIRS, SFT_ROWS
from trainer import main_rm, main_sft, plan
from trainer.data.preferences import Pair
from trainer.data.sft_dataset import Example
from trainer.planner.accelerators import ACCELERATORS
from trainer.planner.model_shape import config_like, shape_of
from trainer.planner.networks import HeldNetwork, held_network
from trainer.planner.supervised import Batch, batches_of, longest_step, micro_batches, supervised_plan
from trainer.supervised.loop import SupervisedJob, packing_metrics
from verl_lite.config import RewardTrainingConfig, SFTConfig, SupervisedConfig
from verl_lite.seqlen_balance import plan_batch

SEVEN, PARAMETERS, H100 = shape_of(config_like("qwen2.5-7b")), 7_615_616_512, ACCELERATORS["h100"]
STEP = Batch(rows=64, longest=4096, tokens=64 * 2048, predicted=64 * 512, shared=64 * 256)
LENGTHS = (5, 3, 4)
ROWS = [Example([1], [2] * (length - 1), [0] * (length - 2) + [1]) for length in LENGTHS]


def seven(config: SupervisedConfig, adapter: int = 0) -> HeldNetwork:
    shape = SEVEN if isinstance(config, SFTConfig) else SEVEN.as_scorer()
    return held_network(8, H100, shape, config.fsdp_config, adapter or shape.parameters, adapter)


def test_bytes_of_seven_billion_parameters_on_eight_devices() -> None:
    config, step = SFTConfig(), replace(STEP, shared=0)
    plan = supervised_plan(config, seven(config), 8, H100, step)
    assert plan.always == {"model: weights": PARAMETERS / 2, "model: AdamW's moments": PARAMETERS}
    assert list(plan.phases) == ["update"]
    # 64 x 2048 / 8 tokens are one micro-batch. Its peak is at the end of the backward pass, where all layers but the
    # first have freed their inputs, and the gradients of the embeddings exist.
    assert plan.micro_batches == 1
    assert plan.phases["update"]["kept activations"] == 16384 * 3584 * 2
    # two micro-batches of 8192 tokens add up whole gradients, which exist at the start of the second backward pass:
    # 28 recomputed layers keep their bf16 inputs, and the last norm keeps an fp32 and two bf16 tensors
    config.data.max_token_len_per_gpu = 8192
    update = supervised_plan(config, seven(config), 8, H100, step).phases["update"]
    assert update["kept activations"] == 8192 * 3584 * (28 * 2 + 8)
    assert update["gradients before their reduction"] == 4 * PARAMETERS


def test_the_reference_of_dpo_is_held_without_an_adapter_and_answers_share_their_prompt() -> None:
    config = SFTConfig(loss="dpo")
    plan = supervised_plan(config, seven(config), 8, H100, STEP, validation=replace(STEP, tokens=8 * 4096, shared=0))
    assert plan.always["reference: weights"] == 2 * PARAMETERS / 8
    assert list(plan.phases) == ["reference log-probs", "validation", "update"]
    tokens = 16384 - 64 * 256 // 8
    assert plan.phases["update"]["kept activations"] == tokens * 3584 * 2  # the input of the first layer
    config.model.use_remove_padding = False
    apart = supervised_plan(config, seven(config), 8, H100, STEP).phases["update"]
    assert apart["kept activations"] == 16384 * 3584 * 2
    adapter = SEVEN.adapter_parameters(16)
    adapted = supervised_plan(config, seven(config, adapter), 8, H100, STEP)
    assert adapted.always == {
        "model: weights": (2 * PARAMETERS + 4 * adapter) / 8, "model: AdamW's moments": adapter
    }  # fmt: skip


def test_a_reward_model_has_a_head_of_one_number_and_no_logits() -> None:
    config = RewardTrainingConfig()
    plan = supervised_plan(config, seven(config), 8, H100, STEP, STEP)
    of_scorer = PARAMETERS - 152_064 * 3584 + 3584
    assert plan.always == {"model: weights": of_scorer / 2, "model: AdamW's moments": of_scorer}
    assert plan.phases["validation"]["logits"] == 0
    assert longest_step(config) == Batch(64, 2048, 64 * 2048, 64 * 2048), "both answers of 1024 tokens"


def test_batches_are_counted() -> None:
    pairs = [Pair(Example([1] * 4, [2] * 3, [1] * 3), Example([1] * 4, [2], [1]))]
    assert batches_of(pairs, [[0]]) == [Batch(1, 12, 12, 4, shared=4)]
    assert batches_of(ROWS, [[0, 2], [1]]) == [Batch(2, 5, 9, 2), Batch(1, 3, 3, 1)]
    config = SFTConfig()
    config.data.max_token_len_per_gpu = 6
    assert micro_batches(config, 1, Batch(3, 5, 12, 3)) == (2, 6)
    assert micro_batches(config, 4, Batch(3, 5, 12, 3)) == (1, 5), "a device has at least the longest row"
    config.ulysses_sequence_parallel_size = 2
    assert micro_batches(config, 4, Batch(3, 5, 48, 3)) == (2, 12), "of 24 tokens for a pair of devices"


def test_how_full_the_micro_batches_are() -> None:
    plan = plan_batch(np.array(LENGTHS), world_size=1, mini_batch_size=None, max_token_len=8, num_tokens=[1, 1, 1])
    found = packing_metrics(plan, ROWS, 8)
    assert found["perf/total_num_tokens"] == found["global_seqlen/max"] == 12 and found["train/micro_batches"] == 2
    assert found["train/micro_batch_fill"] == 12 / 16 and found["train/loss_tokens_frac"] == 3 / 12


def options(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"model.path={tiny_qwen2(tmp_path / 'model')}", f"data.train_files={write(tmp_path / 'rows.parquet', rows)}",
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu", "data.train_batch_size=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("main", "rows", "unit"), [(main_sft.main, SFT_ROWS, "rows"), (main_rm.main, PAIRS, "pairs")], ids=("sft", "rm")
)
def test_a_dry_run_prints_the_plan_and_starts_nothing(
    main: Any, rows: list[Any], unit: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SupervisedJob, "build", None)
    assert main([*options(tmp_path, rows), "trainer.dry_run=true", "trainer.total_epochs=3"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"{unit} per training step +4 .*\n.*tokens per training step", text)
    assert re.search(r"training steps +12 +trainer.total_epochs=3", text) and "* update" in text and "\nfits" in text
    assert "memory per device, expected" in text and "disk, at most" in text
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["dry_run.yaml", "in_use"]


def test_a_model_of_unknown_shape_is_trained_without_a_plan_of_memory(tmp_path: Path, capsys: Any) -> None:
    words = [*options(tmp_path, SFT_ROWS), "trainer.dry_run=true"]
    assert (tmp_path / "model/config.json").unlink() is None
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path / "model")
    assert main_sft.main(words) == 0
    assert re.search(r"memory per device, expected +\? +model.path: its config.json .* has no", capsys.readouterr().out)


def test_an_adapter_of_another_rank_is_refused_before_a_run_starts(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 16}')
    save_file({}, tmp_path / "adapter_model.safetensors")
    words = [*options(tmp_path, SFT_ROWS), f"model.lora_adapter_path={tmp_path}", "model.lora_rank=4"]
    assert main_sft.main(words) == 2 and "set model.lora_rank=2" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


LIKE = ["--command", "main_sft", "--like", "qwen2.5-7b"]


def test_the_planner_plans_supervised_commands(capsys: Any) -> None:
    assert plan.main([*LIKE, "loss=dpo", "trainer.n_gpus_per_node=8", "data.max_length=8192"]) == 0
    text = capsys.readouterr().out
    assert "on 8 x h100" in text and "reference log-probs" in text and "fits 79.1 GiB" in text
    assert plan.main(["--command", "main_rm", *LIKE[2:], "--memory_gb", "24"]) == 1
    assert "does not fit 24.0 GiB" in capsys.readouterr().out
    for words, message in (
        ([*LIKE, "--fit"], "--fit with --command main_sft: only main_ppo has it"),
        ([*LIKE, "data.max_length=20000"], "max_token_len_per_gpu=16384: a row may have 20000 tokens"),
        ([*LIKE, "dpo.beta=0.5"], "dpo.beta=0.5 with loss=sft: it has no effect"),
        ([*LIKE, "model.path=x"], "--like and model.path='x' contradict each other"),
    ):
        assert plan.main(words) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_the_measured_memory_is_near_the_planned(loss: str, tmp_path: Path) -> None:
    """A model of 19 million parameters, whose tensors take about as much memory as the libraries."""
    rows = [{"prompt": "1" * 100, "completion": "2" * 100, "chosen": "2" * 100, "rejected": "3" * 100}] * 8
    words = [*options(tmp_path, rows), f"loss={loss}", "trainer.total_training_steps=2", "trainer.save_freq=0"]
    words[0] = f"model.path={tiny_qwen2(tmp_path / 'large', hidden=512, layers=6, heads=8)}"
    ran = subprocess.run([sys.executable, "-m", "trainer.main_sft", *words], capture_output=True, text=True, check=True)
    found = re.search(r"worker: ([\d.]+) GiB measured, ([\d.]+) expected \(\S+\) for the rows of this run", ran.stdout)
    assert found is not None
    measured, expected = map(float, found.groups())
    assert 0.8 < expected / measured < 1.25
    steps = [json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(step["train/perf/host_peak_gb"] for step in steps if "train/loss" in step) == pytest.approx(
        measured, abs=0.006
    )
