"""The plan of a run: phases by hand, offload and sleep, what to change, disk, and the command's text and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.model_families import tiny_config
from trainer.observe.console import Console
from trainer.observe.tracking import Record
from trainer.plan import main
from trainer.planner.accelerators import ACCELERATORS
from trainer.planner.fit import fewer_processes
from trainer.planner.launched import device_memory_gib, expected_rows, measured_line
from trainer.planner.memory import distinct_prompts, has_prompt_trees, memory_plan
from trainer.planner.memory_table import GIB
from trainer.planner.model_shape import ModelShape, config_like, read_shape, shape_of
from trainer.planner.networks import Networks, read_networks
from trainer.planner.step_time import Lengths, step_stages
from verl_lite.config import NetworkConfig, PPOConfig

SEVEN = shape_of(config_like("qwen2.5-7b"))
PARAMETERS = 7_615_616_512
H100, CPU = ACCELERATORS["h100"], ACCELERATORS["cpu"]


def grpo() -> PPOConfig:
    """256 prompts x 8 samples of at most 512 + 1536 tokens, eight devices, four mini-batches."""
    config = PPOConfig()
    config.rollout.name, config.rollout.n = "vllm", 8
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 256, 64
    config.data.max_prompt_length, config.data.max_response_length = 512, 1536
    config.trainer.n_gpus_per_node = 8
    return config


def test_phases_of_seven_billion_parameters_on_eight_devices() -> None:
    plan = memory_plan(grpo(), Networks(SEVEN), 8, H100)
    assert plan.always == {"actor: weights": PARAMETERS / 2, "actor: AdamW's moments": PARAMETERS}
    phases = plan.phases
    assert list(phases) == ["rollout", "old log-probs", "update", "weight sync"]
    # half of 79.1 GiB is the engine's: 15.2 GB of weights, its step, and the rest for keys and values
    assert sum(phases["rollout"].values()) == pytest.approx(0.5 * 79.1 * GIB)
    assert phases["rollout"]["engine: weights"] == 2 * PARAMETERS
    assert plan.sequences == phases["rollout"]["engine: KV cache"] // (57_344 * 2048)
    # 64 x 8 / 8 rows of 2048 tokens, 16384 tokens at a time: 8 micro-batches, so gradients add up whole
    assert plan.micro_batches == 8
    assert phases["update"]["gradients before their reduction"] == 4 * PARAMETERS
    assert "engine: weights" not in phases["update"], "the engine sleeps"
    assert plan.worst == "update"
    config = grpo()
    config.actor.fsdp_config.reduce_every_micro_batch = True
    update = memory_plan(config, Networks(SEVEN), 8, H100).phases["update"]
    root, layer = 2 * 152_064 * 3584 + 3584, SEVEN.layer_parameters
    assert update["gradients before their reduction"] == 6 * (root + 2 * layer), "bf16, and its fp32 copy"
    assert update["gradients, this rank's shard"] == PARAMETERS / 2


def test_muon_has_one_moment_of_the_matrices_of_the_layers() -> None:
    config = grpo()
    config.actor.optim.optimizer = "muon"
    plan = memory_plan(config, Networks(SEVEN), 8, H100)
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)  # query and output, key and value, MLP
    assert plan.always["actor: Muon's moments"] == (8 * PARAMETERS - 4 * matrices) / 8
    config.model.lora_rank = 16
    adapter = SEVEN.adapter_parameters(16)
    assert memory_plan(config, Networks(SEVEN), 8, H100).always["actor: Muon's moments"] == 4 * adapter / 8


def test_what_is_offloaded_comes_for_its_phase_and_is_on_the_host_else() -> None:
    config = grpo()
    config.actor.fsdp_config.param_offload = config.actor.fsdp_config.optimizer_offload = True
    plan = memory_plan(config, Networks(SEVEN), 8, H100)
    assert plan.always == {}
    assert plan.host == {"actor: weights": PARAMETERS / 2, "actor: AdamW's moments": PARAMETERS}
    phases = plan.phases
    assert phases["update"]["AdamW's moments, from the host"] == PARAMETERS
    assert "AdamW's moments, from the host" not in phases["old log-probs"], "they come when it trains"
    assert phases["weight sync"]["weights, from the host"] == PARAMETERS / 2
    assert "AdamW's moments, from the host" not in phases["weight sync"]
    on_cpu = memory_plan(config, Networks(SEVEN), 8, CPU)
    assert sum(on_cpu.always.values()) == 1.5 * PARAMETERS and not on_cpu.host, "on a CPU nothing moves"
    config.rollout.free_cache_engine = False  # the engine does not sleep
    assert all("engine: KV cache" in parts for parts in memory_plan(config, Networks(SEVEN), 8, H100).phases.values())


def test_reference_critic_and_reward_model_are_held_beside() -> None:
    config = grpo()
    config.actor.use_kl_loss, config.reward_model.enable = True, True
    config.algorithm.adv_estimator = "gae"
    scorer = SEVEN.as_scorer()
    plan = memory_plan(config, Networks(SEVEN, scorer, scorer), 8, H100)
    assert plan.always["reference: weights"] == 2 * PARAMETERS / 8
    of_scorer = PARAMETERS - 152_064 * 3584 + 3584
    assert plan.always["reward model: weights"] == 2 * of_scorer / 8
    assert plan.always["critic: AdamW's moments"] == of_scorer
    names = ["rollout", "reward model", "old log-probs", "reference log-probs", "values", "critic update"]
    assert list(plan.phases) == [*names, "update", "weight sync"]


def test_teachers_are_held_sharded_and_their_tokens_are_counted(tmp_path: Path) -> None:
    """A teacher of 1.5B with the policy of 7B, and the policy as its own teacher, over 64 tokens."""
    config = grpo()
    config.model.path = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_like("qwen2.5-7b")))
    config.distillation.teachers = {"small": {"path": "small"}, "me": {"prompt_template": "{prompt}!"}}
    config.distillation.distillation_loss.loss_mode, config.distillation.distillation_loss.topk = "jsd_topk", 64
    small = shape_of(config_like("qwen2.5-1.5b"))
    plan = memory_plan(config, Networks(SEVEN, teachers={"small": small}), 8, H100)
    assert plan.always["teacher small: weights"] == 2 * small.parameters / 8
    passes = ["old log-probs", "teacher small: log-probs", "teacher me: log-probs", "update"]
    assert [name for name in plan.phases if name in passes] == passes
    # 2048 rows on 8 devices, a log-prob and an id of 4 bytes each for 64 tokens at 1536 positions
    assert plan.host["log-probs of the teachers"] == 256 * 1536 * 64 * 8
    # 8 rows of 2048 tokens in a micro-batch, 1536 of them predicted
    assert plan.phases["update"]["distillation"] == 60 * 64 * 8 * 1536
    assert plan.phases["teacher small: log-probs"]["top tokens"] == 36 * 64 * 8 * 1536
    stages = step_stages(config, Networks(SEVEN, teachers={"small": small}), 8, H100, Lengths(512, 1536))
    assert stages["teacher me: log-probs"].seconds == stages["old log-probs"].seconds
    assert 4 < stages["teacher me: log-probs"].seconds / stages["teacher small: log-probs"].seconds < 6


def test_disk_is_weights_and_moments_of_what_learns(tmp_path: Path) -> None:
    config = grpo()
    config.model.path = folder_with_config(tmp_path)
    config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep = 10, 2
    disk = expected_rows(config, 8, 100)[1]
    one = 12 * read_networks(config).policy.parameters / GIB
    assert f"3 checkpoints of {one:.2f} " in disk.options, "two, and the one being written"
    config.trainer.save_freq = 0
    assert "no checkpoints" in expected_rows(config, 8, 100)[1].options


def test_twice_the_devices_halve_the_passes() -> None:
    config, networks = grpo(), Networks(SEVEN)

    def seconds(slots: int, *mean: int) -> dict[str, float]:
        stages = step_stages(config, networks, slots, H100, Lengths(*mean or (512, 1536)))
        return {name: stage.seconds for name, stage in stages.items()}

    one, two = seconds(8), seconds(16)
    assert two["old log-probs"] == pytest.approx(one["old log-probs"] / 2)
    assert two["update"] == pytest.approx(one["update"] / 2)
    assert one["update"] == pytest.approx(4 * one["old log-probs"]), "forward, backward twice, and forward again"
    short = seconds(8, 512, 100)
    assert short["generation: answers"] < one["generation: answers"] / 15
    # half the prompt is less than half of its arithmetic, as attention falls with the square
    half = seconds(8, 256, 1536)
    assert 0.4 < half["generation: prompts"] / one["generation: prompts"] < 0.5
    assert half["update"] < one["update"] and half["generation: answers"] < one["generation: answers"]
    config.model.enable_gradient_checkpointing = False
    # without recomputed layers only the logits of 256 x 8 / 8 answers of 1536 tokens are computed again
    logits = 2 * 256 * 1536 * 3584 * 152_064 / (H100.flops * H100.training)
    assert seconds(8)["update"] == pytest.approx(3 * one["old log-probs"] + logits)


def folder_with_config(tmp_path: Path) -> str:
    sizes = config_like("qwen2.5-0.5b") | {"num_hidden_layers": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return str(tmp_path)


def test_the_command_plans_a_cluster_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["rollout.n=8", "trainer.n_gpus_per_node=8", "trainer.nnodes=16"]
    options.append(f"model.path={folder_with_config(tmp_path)}")
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "on 128 x h100 in 16 machines" in text and "fits 79.1 GiB" in text and "a step" in text
    assert main([*options, "--memory_gb", "2", "rollout.name=vllm"]) == 1
    told = capsys.readouterr().out
    assert "does not fit 2.0 GiB" in told and "on a GPU only" in told
    assert re.search("generation: answers .* reading weights, keys and values", told)
    assert main([*options, "--mean_prompt", "100", "--mean_response", "300"]) == 0
    assert "prompts of 100 tokens (--mean_prompt), answers of 300 (--mean_response)" in capsys.readouterr().out


def test_long_answers_come_with_advice_and_a_tiny_model_with_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 32k tokens half of an H100 less 7B of weights holds 13 answers of 57,344 bytes a token at a time."""
    lengths = ["data.max_prompt_length=1024", "data.max_response_length=32768", "actor.ppo_max_token_len_per_gpu=33792"]
    assert main([*LIKE, "rollout.name=vllm", "rollout.n=8", *lengths]) == 0
    told = capsys.readouterr().out
    assert re.search(r"generation takes [78]\d% of the step", told)
    assert "decodes 13 of its 1,024 answers at a time: raise rollout.gpu_memory_utilization" in told
    assert main([*LIKE, "rollout.name=vllm", "rollout.n=8", *lengths[:1], "data.max_response_length=30"]) == 0
    assert "To shorten it" not in capsys.readouterr().out
    few = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "data.max_response_length=4"]
    assert main([f"model.path={folder_with_config(tmp_path)}", "rollout.name=vllm", "rollout.n=8", *few]) == 0
    told = capsys.readouterr().out
    arithmetic, _, time = told.partition("time of a step")
    assert "tokens/s" not in time and " 0.0 " not in time and "on a CPU rollout.name=hf" not in arithmetic


LIKE = ["--like", "qwen2.5-7b"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([*LIKE, "--device", "b200"], "--device: invalid choice: .b200. .*h100"),
        (["--like", "qwen-7b"], "--like: invalid choice: .qwen-7b. .*qwen2.5-7b"),
        ([*LIKE, "model.path=somewhere"], "contradict each other"),
        ([*LIKE, "rollout.n=8", "--mean_response", "9999"], "--mean_response 9999: .* above 0 and at most"),
        ([*LIKE, "--mean_prompt", "9999"], "--mean_prompt 9999: expected a number above 0 and at most"),
        ([*LIKE, "--memory_gb", "-1"], "--memory_gb -1: expected a number above 0"),
        ([*LIKE, "actor.ppo_mini_batch_size=2000"], "=2000 with data.train_batch_size=1024"),
        ([*LIKE, "trainer.nodes=2"], "nnodes"),
        (["recipe=quickstart", "model.path=/not/made"], "recipe=quickstart creates it in its first run.*dry_run=true"),
        (["model.path=/nowhere"], "model.path=./nowhere.*cannot be read.*--like"),
        ([], "model.path=null: expected a folder with config.json, or --like"),
    ],
)
def test_wrong_input_is_a_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(options)
    except SystemExit as error:  # argparse's own
        status = int(str(error.code))
    assert status == 2 and re.search(sentence, " ".join(capsys.readouterr().err.split()))


def test_a_run_tells_what_it_expects_and_what_was_measured(tmp_path: Path) -> None:
    config = grpo()
    config.trainer.device, config.rollout.name = "cpu", "hf"
    [unknown] = expected_rows(config, 1, 10)
    assert unknown.value == "?"
    config.model.path = folder_with_config(tmp_path)
    memory, disk = expected_rows(config, 1, 10)
    assert memory.value.endswith(" GiB") and "1 checkpoint of" in disk.options
    assert measured_line(config, 1, tmp_path) == ""
    tracker = Record(tmp_path, Console().note)
    for step, (memory_gb, prompt, answer) in enumerate([(2.0, 40.0, 30.0), (4.0, 60.2, 20.0)], start=1):
        tracker.log(
            {"actor/perf/host_peak_gb": memory_gb, "prompt_length/mean": prompt, "response_length/mean": answer}, step
        )
    networks = Networks(ModelShape(896, 2, 14, 2, 64, 4864, 1000, True, True))
    whole = memory_plan(config, networks, 1, CPU).device_bytes / GIB
    config.data.max_prompt_length, config.data.max_response_length = 61, 30
    config.rollout.max_model_len = 512 + 1536  # the cache of the engine exists for the maximum lengths
    expected = memory_plan(config, networks, 1, CPU).device_bytes / GIB
    config.data.max_prompt_length, config.data.max_response_length = 512, 1536
    config.rollout.max_model_len = None
    assert measured_line(config, 1, tmp_path) == (
        f"Memory of the fullest worker: 4.00 GiB measured, {expected:.2f} expected ({expected / 4 - 1:+.0%}) for the "
        f"lengths of this run, {whole:.2f} for the maximum lengths"
    )


def test_answers_to_one_prompt_share_its_tokens_but_not_in_attention() -> None:
    config = grpo()
    config.actor.ppo_mini_batch_size, config.actor.ppo_max_token_len_per_gpu = 2, 1 << 20
    config.model.enable_gradient_checkpointing = False
    kept = "kept activations"

    def update(config: PPOConfig, shape: ModelShape = SEVEN) -> dict[str, float]:
        return memory_plan(config, Networks(shape), 1, H100).phases["update"]

    assert distinct_prompts(config, SEVEN, 16, 2) == 2 and distinct_prompts(config, SEVEN, 1, 2) == 1
    shared, apart = update(config), replace(SEVEN, is_packed=False)
    times = [
        step_stages(config, Networks(shape), 1, H100, Lengths(512, 1536))["update"].seconds for shape in (SEVEN, apart)
    ]
    assert times[1] > times[0]
    in_rows = update(config, apart)
    config.model.use_remove_padding = False
    # 16 rows of 512 + 1536 tokens, of 2 prompts. Of each prompt token that is not repeated a layer spares its norms
    # (2 x 8 bytes), gate, activation, up and product (4 x 2 x 18944); of queries, keys, values and outputs attention
    # has all, besides the outputs once more without those repeated
    spared, left = 14 * 512, 2 * 512 + 16 * 1536
    per_layer = spared * (16 * 3584 + 2 * 4 * 18944 + 2 * 3584) - left * 2 * 3584
    assert update(config)[kept] - shared[kept] == pytest.approx(28 * per_layer + spared * 8 * 3584)
    assert in_rows == update(config), "as of a network whose rows are of their own"


def test_on_a_cpu_short_answers_to_one_prompt_need_no_copies_of_it_in_attention() -> None:
    """Rows of 40 + 10 tokens: 4 answers to a prompt are a row of 80 in attention, with 6,400 scores instead of 4 x
    2,500. Of 30 answers to one, a row of 340 has 115,600 instead of 75,000."""
    data = grpo().data
    data.max_prompt_length, data.max_response_length = 40, 10
    assert has_prompt_trees(data, rows=8, distinct=2)
    assert not has_prompt_trees(data, rows=30, distinct=1)
    assert not has_prompt_trees(data, rows=8, distinct=8), "nothing is shared"
    data.max_prompt_length = 1000
    assert has_prompt_trees(data, rows=2, distinct=1) and not has_prompt_trees(data, rows=3, distinct=1), "1024 tokens"

    config = grpo()
    config.rollout.name, config.rollout.n = "hf", 4
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = 1000
    config.data.max_prompt_length, config.data.max_response_length = 40, 10
    config.actor.ppo_max_token_len_per_gpu = 1 << 20
    config.model.enable_gradient_checkpointing = False
    shape = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, inner=16, vocab=10)
    kept = memory_plan(config, Networks(shape), 1, CPU).phases["update"]["kept activations"]
    # fp32 numbers per token of a layer: two norms (3 x 8), queries and outputs (3 x 8), keys and values (2 x 4), MLP (4
    # x 16); the last norm keeps 3 x 8
    per_token = 4 * (2 * (2 * 3 * 8 + 3 * 8 + 2 * 4 + 4 * 16) + 3 * 8)
    assert kept == 1000 * 80 * per_token


def test_on_a_cpu_the_copies_of_an_engine_exist_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = grpo()
    config.rollout.name = "hf"
    copies, step = "engine: copies of its matrices", "engine: a step"
    plan = memory_plan(config, Networks(SEVEN), 2, CPU)
    # all matrices of the seven billion parameters but the embedding, in fp32
    matrices = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944) + 152_064 * 3584
    assert plan.phases["rollout"][copies] == 4 * matrices
    for phase in ("old log-probs", "update", "weight sync"):
        assert "engine: weights" in plan.phases[phase] and not {copies, step} & plan.phases[phase].keys()
    config.rollout.free_cache_engine = False
    plan = memory_plan(config, Networks(SEVEN), 2, CPU)
    assert copies in plan.phases["update"] and copies not in plan.phases["weight sync"]
    for key, value in (("dtype", "bf16"), ("router_replay", True), ("name", "vllm")):
        with monkeypatch.context() as other:
            other.setattr(config.rollout, key, value)
            assert copies not in memory_plan(config, Networks(SEVEN), 2, CPU).phases["rollout"]


def test_a_bucket_is_smaller_on_a_cpu() -> None:
    rollout = PPOConfig().rollout
    assert (rollout.bucket_megabytes(on_cpu=True), rollout.bucket_megabytes(on_cpu=False)) == (64, 512)
    rollout.update_weights_bucket_megabytes = 7
    assert rollout.bucket_megabytes(on_cpu=True) == rollout.bucket_megabytes(on_cpu=False) == 7


def test_a_plan_that_does_not_fit_says_what_to_change() -> None:
    config = grpo()
    config.rollout.name, config.rollout.kv_cache_memory_mb = "hf", 40_000
    plan = memory_plan(config, Networks(SEVEN), 2, CPU)
    text = "\n".join(plan.lines("cpu", 8.0))
    assert "does not fit 8.0 GiB: the phase 'update' needs" in text
    # moments of 8 bytes for each parameter, divided over two processes
    moments = f"{4 * PARAMETERS / GIB:.2f}"
    assert re.search(rf"actor: AdamW's moments +{moments}   model.lora_rank=16 trains an adapter", text)
    assert re.search(r"engine: KV cache +\d+\.\d\d   a smaller rollout.kv_cache_memory_mb", text)
    assert "does not fit" not in "\n".join(plan.lines("cpu", 1e6))


def test_fewer_processes_have_the_memory_of_all() -> None:
    """Each process has libraries and an engine of its own, so that one process needs less than two together."""
    config = grpo()
    config.rollout.name, config.trainer.n_gpus_per_node = "hf", 2
    networks = Networks(ModelShape(896, 2, 14, 2, 64, 4864, 1000, True, True))
    one, two = (memory_plan(config, networks, slots, CPU).device_bytes / GIB for slots in (1, 2))
    assert two < one < 2 * two
    advice = fewer_processes(config, networks, 2, CPU, one / 2 + 0.01)
    assert advice == f"trainer.n_gpus_per_node=1 fits: the only process needs {one:.2f} GiB and has {one + 0.02:.1f}"
    assert fewer_processes(config, networks, 2, CPU, one / 2 - 0.01) == ""
    assert fewer_processes(config, networks, 2, H100, 80.0) == ""


@pytest.mark.parametrize(("family", "is_packed"), [("stablelm", False), ("falcon_h1", True)])
def test_the_plan_knows_which_networks_share_prompts(family: str, is_packed: bool, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    assert read_shape(NetworkConfig(path=str(tmp_path))).is_packed is is_packed


def test_a_free_part_of_this_machine_is_what_a_cpu_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory_gib(H100, 2) == H100.memory_gib
    monkeypatch.setattr("trainer.planner.launched.available_memory", lambda: 8 * GIB)
    assert device_memory_gib(CPU, 2) == 4.0


def test_the_memory_of_separate_engines_is_planned_apart_from_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["trainer.n_gpus_per_node=4", "rollout.n=4", "data.max_response_length=1024", "data.train_batch_size=256"]
    for pool in ([], ["hybrid_engine=false", "rollout.nnodes=1", "rollout.n_gpus_per_node=4"]):
        main(["--like", "qwen2.5-1.5b", *sizes, *pool])
        shown = capsys.readouterr().out
        assert bool(re.search(r"^[* ] rollout +\d", shown, re.MULTILINE)) is not bool(pool)
        assert ("of an engine" in shown) is bool(pool)


def test_the_removed_option_names_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--like", "qwen2.5-1.5b", "--placement"]) == 2
    assert "--placement was removed" in capsys.readouterr().err
