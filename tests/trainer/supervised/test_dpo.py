"""DPO: the formula, the denominators, a plain loop of transformers, resume, LoRA, and refused input."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.trainer.prompt_rows import write
from tests.trainer.supervised.test_reward_training import assert_same, pairs_of, three_steps
from tests.workers.ranks import OnRanks
from trainer import main_sft
from trainer.supervised.loop import train_within
from trainer.supervised.sft import SFTJob
from verl_lite.algos.preference_losses import dpo_loss
from verl_lite.config import DPOConfig, ModelConfig, OptimConfig, SFTConfig, SFTDataConfig, SFTTrainerConfig
from verl_lite.metrics import combine, values
from verl_lite.protocol import DataProto
from workers.supervised.dpo import DPOWorker, dpo_step_loss

BETA, SMOOTHING = 0.5, 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1, heads=1)


def test_a_worked_example() -> None:
    """r(chosen) = 0.5 (-2 + 3) = 0.5, r(rejected) = 0.5 (-3 + 2.5) = -0.25, d = 0.75. exp(-0.75) = 0.472367, so the
    loss is ln 1.472367 = 0.386871. Since -log sigmoid(-d) = d - log sigmoid(d), smoothing 0.1 adds 0.1 * 0.75.
    The slope in log p(chosen) is -0.5 sigmoid(-0.75) = -0.5 * 0.472367 / 1.472367 = -0.160411."""
    logps = torch.tensor([[-2.0, -3.0]], requires_grad=True)
    ref_logps = torch.tensor([[-3.0, -2.5]])
    losses, rewards = dpo_loss(logps, ref_logps, beta=0.5)
    assert losses.tolist() == pytest.approx([0.386871], abs=1e-6) and rewards.tolist() == [[0.5, -0.25]]
    losses.sum().backward()
    assert logps.grad is not None and logps.grad[0].tolist() == pytest.approx([-0.160411, 0.160411], abs=1e-6)
    assert dpo_loss(logps, ref_logps, 0.5, 0.1)[0].item() == pytest.approx(0.461871, abs=1e-6)


def test_a_pair_without_a_preference_is_not_accurate() -> None:
    """The rewards of both answers are 0, as before the first step: TRL counts chosen rewards above rejected ones."""
    log_probs = torch.tensor([[-1.0], [-3.0]])
    data = DataProto.from_dict(
        {"response_mask": torch.ones(2, 1), "ref_log_prob": log_probs}, meta_info={"num_tokens": 1}
    )
    _, metrics = dpo_step_loss(data, {"log_probs": log_probs}, 0.5, 0.0)
    assert values(metrics)["rewards/accuracies"] == 0


def test_a_micro_batch_divides_by_the_pairs_of_the_whole_step_and_padding_does_not_count() -> None:
    log_probs = torch.tensor([[-1.0, -1.0], [-3.0, -50.0], [-4.0, 0.0], [-1.0, -1.0], [-7.0, -7.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1], [0, 0], [0, 0]])  # two pairs and a padding pair
    reference = torch.tensor([[-1.5, -1.5], [-2.5, 0.0], [-2.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    data = DataProto.from_dict({"response_mask": mask, "ref_log_prob": reference}, meta_info={"num_tokens": 5})
    loss, metrics = dpo_step_loss(data, {"log_probs": log_probs}, 0.5, 0.0)
    losses = [0.386871, math.log(1 + math.e)]  # the first is the worked example; r = -1 and 0, so d = -1
    assert loss.item() == pytest.approx(sum(losses) / 5, abs=1e-6)  # the other three pairs are in other micro-batches
    assert values(metrics) == pytest.approx(
        {
            "loss": sum(losses) / 2, "rewards/accuracies": 0.5, "rewards/margins": (0.75 - 1) / 2,
            "rewards/chosen": (0.5 - 1) / 2, "rewards/rejected": -0.25 / 2,
            "logps/chosen": -3.0, "logps/rejected": -2.5,
        },
        abs=1e-6,
    )  # fmt: skip


def test_wrong_input_is_refused_in_one_message(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(row: dict[str, Any], *options: str) -> str:
        path = write(tmp_path / "pairs.jsonl", [row])
        given = [f"model.path={model}", f"data.train_files={path}", "trainer.device=cpu", *options]
        assert main_sft.main([*given, f"trainer.default_local_dir={tmp_path}/dpo"]) == 2
        return capsys.readouterr().err

    row = {"prompt": "1", "chosen": "2", "rejected": "3"}
    for options, message in (
        (["loss=ipo"], "loss=ipo is not known; known: dpo, sft"),
        (["dpo.beta=0.2"], "dpo.beta=0.2 with loss=sft: it has no effect: set loss=dpo, or leave dpo.beta out"),
        (["dpo.label_smoothing=0.5"], "dpo.label_smoothing=0.5: at least 0 and less than 0.5 is expected"),
        (["loss=dpo", "dpo.beta=0"], "dpo.beta=0.0: a number above 0 is expected"),
        (["loss=dpo", "data.truncation=right"], "data.truncation=right with loss=dpo: part of an answer is another"),
        (["loss=dpo", "data.chosen_key=better"], "there is no column 'better' (data.chosen_key)"),
    ):
        assert message in refused(row, *options)
    turn = {"role": "user", "content": "1"}
    chats = [
        [turn, {"role": "assistant", "content": text}, turn, {"role": "assistant", "content": text}] for text in "23"
    ]
    for wrong, message in (
        (row | {"rejected": "2"}, "both answers have the same tokens"),
        (row | {"rejected": ""}, "the rejected answer has no tokens before its end-of-turn token; remove such rows"),
        ({"chosen": chats[0], "rejected": chats[1]}, "the chats differ before their last message"),
        ({"prompt": "1", "completion": "2"}, "there is no column 'chosen' (data.chosen_key)"),
    ):
        shown = refused(wrong, "loss=dpo")
        assert f"data.train_files: row 0 of {tmp_path}/pairs.jsonl" in shown and message in shown


def plain_loss(policy: Any, reference: Any, rows: list[dict[str, str]], beta: float, smoothing: float) -> torch.Tensor:
    """Mean DPO loss of the rows: one forward of transformers for each answer, without packing or padding."""
    tokenizer, losses = tiny_tokenizer(), []
    for row in rows:
        ratios = []
        for answer in (row["chosen"], row["rejected"]):
            chat = [{"role": "user", "content": row["prompt"]}]
            asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            ids = torch.tensor([[*asked, *tokenizer(f"{answer}<|im_end|>")["input_ids"]]])
            one, other = (
                network(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(asked) - 1 :].sum()
                for network in (policy, reference)
            )
            ratios.append(one - other.detach())
        d = beta * (ratios[0] - ratios[1])
        losses.append((1 - smoothing) * (1 + (-d).exp()).log() + smoothing * (1 + d.exp()).log())
    return torch.stack(losses).mean()


def learnt(model: str, budget: int, packed: bool, world: int, lora_rank: int = 0) -> Any:
    """`three_steps` of DPO."""
    network = ModelConfig(path=model, enable_gradient_checkpointing=False, use_remove_padding=packed)
    network.lora_rank = lora_rank
    optim, trainer = OptimConfig(lr=1e-2, eps=1e-2), SFTTrainerConfig(device="cpu")
    config = SFTConfig(model=network, optim=optim, dpo=DPOConfig(BETA, SMOOTHING), trainer=trainer)
    return three_steps(DPOWorker(config, 3), budget, world)


@pytest.mark.slow
def test_any_split_learns_what_a_plain_loop_of_transformers_learns(model: str, two_ranks: OnRanks) -> None:
    policy, initial = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.01)
    losses = []
    for step in range(3):
        loss = plain_loss(policy, initial, pairs_of(21)[7 * step : 7 * step + 7], BETA, SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    plain = {name: tensor.detach().numpy() for name, tensor in policy.named_parameters()}
    start = {name: tensor.detach().numpy() for name, tensor in initial.named_parameters()}
    assert (
        losses[0] == pytest.approx(math.log(2)) and max(abs(plain[name] - start[name]).max() for name in start) > 1e-3
    )
    metrics, _ = learnt(model, 10_000, True, 1)
    assert [values(step)["loss"] for step in metrics] == pytest.approx(losses, rel=1e-4)
    for budget, packed in ((10_000, True), (75, True), (100, True), (10_000, False)):
        found, weights = learnt(model, budget, packed, 1)
        assert_same(weights, plain)
        assert [values(step) for step in found] == [pytest.approx(values(step), rel=1e-3, abs=1e-6) for step in metrics]
    for _, weights in (parts := two_ranks(learnt, model, 75, True, 2)):
        assert_same(weights, plain)
    together = [values(combine([rank[0][step] for rank in parts])) for step in range(3)]
    assert together == [pytest.approx(values(step), rel=1e-3, abs=1e-6) for step in metrics]
    adapted = learnt(model, 10_000, True, 1, 4)
    assert values(adapted[0][0])["rewards/margins"] == 0 != values(adapted[0][2])["rewards/margins"]
    assert_same(learnt(model, 75, True, 1, 4)[1], adapted[1])


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_learns_and_a_stopped_run_goes_on_to_the_same_weights(model: str, tmp_path: Path, lora_rank: int) -> None:
    train, val = (write(tmp_path / f"{name}.parquet", pairs_of(number)) for name, number in (("t", 96), ("v", 20)))
    arguments = [
        "loss=dpo", f"dpo.beta={BETA}", f"data.train_files={train}", f"data.val_files={val}", f"model.path={model}",
        "data.train_batch_size=20", "optim.lr=5e-3", "trainer.device=cpu", "trainer.logger=[jsonl]",
        "trainer.save_freq=4", f"model.lora_rank={lora_rank}", "trainer.total_training_steps=12",
        "model.enable_gradient_checkpointing=false",
    ]  # fmt: skip
    whole, parts = (f"trainer.default_local_dir={tmp_path}/{name}" for name in ("whole", "parts"))
    assert main_sft.main([*arguments, whole]) == 0
    assert main_sft.main([*arguments, parts, "trainer.total_training_steps=8"]) == 0
    assert main_sft.main([*arguments, parts, "trainer.resume_mode=auto"]) == 0
    networks = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf") for name in ("whole", "parts")]
    one, other = (dict(network.named_parameters()) for network in networks)
    assert all(torch.equal(one[name], other[name]) for name in one)
    log = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    first, last = log[0]["data"], {name: value for line in log for name, value in line["data"].items()}
    assert first["val/loss"] == pytest.approx(math.log(2)) and first["val/rewards/accuracies"] == 0  # all rewards are 0
    assert last["val/rewards/accuracies"] > 0.8 and last["val/rewards/margins"] > 0.5
    with torch.no_grad():
        loss = plain_loss(networks[0], AutoModelForCausalLM.from_pretrained(model), pairs_of(20), BETA, 0.0)
    assert last["val/loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_first_loss_with_an_initial_adapter_is_that_of_equal_policies(
    model: str, tmp_path: Path, rank: int
) -> None:
    """The reference is the initial policy, so all ratios are 1 and the loss is -log sigmoid(0) = ln 2. A step of
    training moves the policy away from it, and a resumed worker keeps it. rank: of the initial adapter; 0 = none."""
    network = ModelConfig(path=model)
    if rank:
        adapted = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(model),
            peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
        adapted.save_pretrained(tmp_path / "adapter")
        network = ModelConfig(path=model, lora_rank=rank, lora_alpha=8, lora_adapter_path=str(tmp_path / "adapter"))

    pairs = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "a"} for number in range(4)]
    config = SFTConfig(
        loss="dpo",
        model=network,
        data=SFTDataConfig(train_files=[str(write(tmp_path / "pairs.jsonl", pairs))], train_batch_size=4),
        optim=OptimConfig(lr=1e-2),
        trainer=SFTTrainerConfig(
            device="cpu", default_local_dir=str(tmp_path / "run"), total_epochs=2, save_freq=1, logger=["jsonl"]
        ),
    )
    train_within(SFTJob, config, lambda line: None)
    losses = losses_of(tmp_path / "run")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-7) and losses[1] < 0.69

    # the second loss again, by a run that resumes after the first step
    shutil.rmtree(tmp_path / "run/global_step_2")
    config.trainer.resume_mode = "resume_path"
    config.trainer.resume_from_path = str(tmp_path / "run/global_step_1")
    config.trainer.default_local_dir = str(tmp_path / "resumed")
    train_within(SFTJob, config, lambda line: None)
    assert losses_of(tmp_path / "resumed") == pytest.approx(losses[1:], abs=1e-7)


def losses_of(run_dir: Path) -> list[float]:
    """The training losses of a run in the order of its steps."""
    logged = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [data["train/loss"] for data in logged if "train/loss" in data]
