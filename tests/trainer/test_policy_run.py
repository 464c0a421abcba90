"""Runs in this process of an adapter, with no reference model and a KL from 0, resumed and exported both ways, and of
experts, balanced, with those of the rollout in the update, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.guess_number import GUESS_NUMBER
from tests.set_keys import set_keys
from tests.tiny_experts import tiny_experts
from tests.tiny_model import tiny_qwen2
from tests.trainer import tiny_run
from trainer import main_sft
from trainer.export import main as export
from trainer.launch.build import worker_classes
from trainer.launch.engine_checks import check_experts
from trainer.launch.ppo_job import run_ppo, sampling_notes
from trainer.observe.tracking import read_metrics
from trainer.planner.batch import launch_table
from trainer.planner.networks import checkpoint_bytes
from verl_lite.config import ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from verl_lite.errors import UserError

OPTIONS = [
    "actor.use_kl_loss=true", "actor.optim.lr=1e-2", "trainer.save_freq=1", "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8", "actor_rollout_ref.model.target_modules=all-linear",
]  # fmt: skip
TOKENS = torch.tensor([[3, 9, 30, 11]])


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(8)])
    return tiny_run.options_of(tmp_path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.slow
def test_a_run_with_an_adapter_is_its_own_reference_and_exports_both_ways(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options += OPTIONS
    run_ppo([*options, "trainer.total_training_steps=2"])
    assert "trainable parameters" in capsys.readouterr().out
    run_dir = tmp_path / "run"
    first, second = read_metrics(run_dir / "metrics.jsonl").values()
    assert first["actor/kl_loss"] == 0.0 and second["actor/kl_loss"] > 1e-6
    assert first["actor/grad_norm"] > 0
    assert not list(run_dir.glob("logs/*ref*"))
    run_ppo([*options, "trainer.total_training_steps=3", "trainer.resume_mode=auto"])
    assert list(read_metrics(run_dir / "metrics.jsonl")) == [1, 2, 3]
    with pytest.raises(UserError, match="model.lora_rank: 4 in the checkpoint, 8 now"):
        run_ppo([*options, "model.lora_rank=8", "trainer.total_training_steps=4", "trainer.resume_mode=auto"])
    allowed = ["trainer.resume_mode=auto", "trainer.resume_allow=[model.lora_rank,model.lora_alpha]"]
    for rank in (8, 0):  # as main_eval, which does not compare the options, loads it
        with pytest.raises(UserError, match=r"has other parameters: .*\(model.lora_rank=4\)"):
            run_ppo([*options, f"model.lora_rank={rank}", "trainer.total_training_steps=4", *allowed])

    assert export([str(run_dir), "--to", str(tmp_path / "merged")]) == 0
    assert export([str(run_dir), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    start = logits(base)
    with_adapter = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - with_adapter).abs().max() < 1e-5 < 1e-3 < (merged - start).abs().max()


def test_supervised_fine_tuning_trains_an_adapter_too(tmp_path: Path) -> None:
    model = tiny_qwen2(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "response": "=2"}) + "\n")
    arguments = [
        f"data.train_files={tmp_path / 'rows.jsonl'}", f"model.path={model}", "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path / 'sft'}", "optim.lr=1e-2", "trainer.device=cpu",
    ]  # fmt: skip
    assert main_sft.main([*arguments, "model.lora_rank=2", "model.target_modules=[q_proj]"]) == 0
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for folder in (model, tmp_path / "sft" / "hf")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert main_sft.main([*arguments, "model.lora_alpha=2"]) == 2


def test_what_an_adapter_spares_is_counted(tmp_path: Path) -> None:
    config = PPOConfig()
    config.model.path = tiny_qwen2(tmp_path)
    config.actor.use_kl_loss, config.rollout.name = True, "hf"
    assert list(worker_classes(config, 1, None, tmp_path)) == ["ref", "actor_rollout"]
    whole = checkpoint_bytes(config)
    assert "trainable parameters" not in launch_table(config, 1)
    config.model.lora_rank, config.model.target_modules = 2, ["q_proj", "down_proj"]
    learns = 2 * 2 * ((64 + 64) + (256 + 64))
    parameters = whole // 12
    assert checkpoint_bytes(config) == 12 * learns
    assert list(worker_classes(config, 1, None, tmp_path)) == ["actor_rollout"]
    assert f"{learns:,}   of {parameters:,}: model.lora_rank=2 on q_proj, down_proj" in launch_table(config, 1)


def test_an_unknown_layer_is_refused_before_anything_starts(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="q_projj matches no linear layer .* its layers are down_proj, gate_proj, k"):
        run_ppo([*options, *OPTIONS, "model.target_modules=[q_projj]"])
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_at_temperature_0_7(tmp_path: Path) -> None:
    """Weights hardly move in two steps: engine, old log-probs, update and reference agree, and the seeds differ."""
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(4)])
    several = ["rollout.n=4", "actor.ppo_mini_batch_size=2", "actor.use_kl_loss=true"]
    steps = tiny_run.run(tmp_path, "run", "rollout.temperature=0.7", "trainer.total_training_steps=2", *several)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5 and step["actor/grad_norm"] > 0
        assert 1 < step["actor/ratio_max"] < 1.02 and step["actor/kl_loss"] < 1e-4
    rows = (tiny_run.samples(tmp_path, "run", step) for step in (1, 2))
    drawn = [{(row["input"], row["sample"]): row["output"] for row in step} for step in rows]
    assert sum(drawn[0][key] == drawn[1][key] for key in drawn[0]) < 8, "of 16 answers"


@pytest.mark.parametrize("more", [[], OPTIONS[3:]], ids=["whole model", "adapter"])
def test_a_run_with_truncated_sampling(tmp_path: Path, more: list[str]) -> None:
    """Engine, old log-probs, update and reference use the same tokens; otherwise they would be 0.1 and more apart."""
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(4)])
    cut = ["rollout.top_p=0.8", "rollout.top_k=20", "rollout.min_p=0.01", "rollout.temperature=0.7"]
    several = ["actor.ppo_mini_batch_size=2", "actor.use_kl_loss=true", "actor.calculate_entropy=true"]
    for step in tiny_run.run(tmp_path, "run", "trainer.total_training_steps=2", *cut, *several, *more):
        assert step["training/rollout_probs_diff_mean"] < 1e-6 and step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/kl_loss"] < 1e-4 and step["actor/ratio_max"] < 1.02 and step["actor/grad_norm"] > 0
        assert step["actor/entropy"] < 2.8, "of at most 20 of 64 tokens"


# -------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.slow
def test_a_run_balances_its_experts_and_replays_those_of_the_rollout(options: list[str], tmp_path: Path) -> None:
    options += [
        f"model.path={tiny_experts(tmp_path / 'experts')}", "rollout.router_replay=true", "actor.ppo_epochs=2",
        "actor.router_aux_loss_coef=0.01", "actor.optim.lr=1e-2", "trainer.save_freq=1",
    ]  # fmt: skip
    for steps in (1, 2):
        run_ppo([*options, f"trainer.total_training_steps={steps}", "trainer.resume_mode=auto"])
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    for step in (first, second):
        assert 1 <= step["actor/router_aux_loss"] <= 4 and step["actor/grad_norm"] > 0
        assert 0 < step["actor/router_replay_changed"] < 1, "the second epoch's router has moved"
        assert step["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_episodes_replay_their_experts_also_where_they_began_a_step_before(tmp_path: Path) -> None:
    guess = {
        "env_type": GUESS_NUMBER, "max_steps": 3, "max_tokens_per_step": 4, "agent_template": "{observation}",
        "env_config": {"low": 1, "high": 4, "answer_pattern": r"(\d)", "env_instruction": "1-4? "},
    }  # fmt: skip
    config = {"agentic": {"custom_envs": {"guess": guess}}}
    (tmp_path / "envs.yaml").write_text(json.dumps(config))
    options = [
        "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", "rollout.router_replay=true",
        f"model.path={tiny_experts(tmp_path / 'experts')}", "data.max_prompt_length=48", "data.max_response_length=96",
        "actor.optim.lr=1e-2", "actor.entropy_coeff=1", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2",
        "trainer.logger=[jsonl]", "trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false",
        "trainer.total_training_steps=2", "agentic.train_env_manager.tags=[guess]", "agentic.rollout_batch_size=4",
        "agentic.train_env_manager.num_env_groups=2", "agentic.train_env_manager.group_size=2",
        "agentic.env_pool.num_workers=0", "async_training.max_off_policy_threshold=1",
    ]  # fmt: skip
    run_ppo(["--config", str(tmp_path / "envs.yaml"), *options, f"trainer.default_local_dir={tmp_path / 'run'}"])
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    assert len(steps) == 2 and all(0 < step["actor/router_replay_changed"] < 1 for step in steps)


def test_notes_on_samplers_that_learn_late_and_on_environments_that_wait_for_each_other() -> None:
    """8 groups of 4 episodes on 2 engines of 2 devices: 16 at once on an engine."""
    late = set_keys(PPOConfig(), async_training__max_off_policy_threshold=2, async_training__batches_ahead=2)
    assert not [*sampling_notes(late, 4)]
    late.data.sampler.class_path = "sampler.py"
    assert "receives the results 2 steps later" in " ".join(sampling_notes(late, 4))
    manager = {"tags": ["lake"], "num_env_groups": 8, "group_size": 4}
    keys = {f"agentic__train_env_manager__{name}": value for name, value in manager.items()}
    acting = set_keys(PPOConfig(), rollout__tensor_model_parallel_size=2, agentic__env_pool__num_workers=3, **keys)
    acting.agentic.env_pool.threads = 5
    [note] = sampling_notes(acting, 4)
    assert "16 episodes run at once" in note and "num_workers=3 x threads=5 = 15 environments" in note
    acting.agentic.env_pool.num_workers = 4
    assert not [*sampling_notes(acting, 4)]


def test_replay_is_refused_where_no_experts_are_kept(tmp_path: Path) -> None:
    experts, dense = tiny_experts(tmp_path / "experts"), tiny_qwen2(tmp_path / "dense")
    replay, model = RolloutConfig(name="hf", router_replay=True), ModelConfig(path=experts)
    check_experts(PPOConfig(model=model, rollout=replay))
    cases = {
        "rollout.name=vllm: trainer.device=cpu: .* set rollout.name=hf": PPOConfig(
            model=model, rollout=RolloutConfig(name="vllm", router_replay=True), trainer=TrainerConfig(device="cpu")
        ),
        "rollout.name=my.engine:Engine: the engines hf and vllm": PPOConfig(
            model=model, rollout=RolloutConfig(name="my.engine:Engine", router_replay=True)
        ),
        "Qwen2ForCausalLM has no experts": PPOConfig(model=ModelConfig(path=dense), rollout=replay),
    }
    for told, config in cases.items():
        with pytest.raises(UserError, match=f"rollout.router_replay=true.*{told}"):
            check_experts(config)
