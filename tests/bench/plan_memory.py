"""Predicted against measured memory and time of a training step on the CPU, phase by phase.

`python -m tests.bench plan_memory [--only NAME ...] [--steps 2]`. Each case is a run of the main command in a process
of its own (`trainer.backend=inline`: driver and worker are one process) on a random Qwen2 of 81 million parameters in
fp32; the cases "135M" have the model of `smollm2_shape.py`, those of 1M and 12M the models of `bench step`. Measured:
the highest resident memory within a phase of the last step (VmHWM, reset at its begin), less the resident memory just
before the models are built (Python, libraries, data). Predicted: `planner.memory.memory_plan` from the same options and
the model's config.json; with vLLM also its libraries, a constant. Seconds are CPU time, which other programs on the
machine disturb less, against `planner.step_time` with a rate of the core that is measured at the same time. The C
library keeps freed memory for the next tensor; it is given back at the begin of each phase (malloc_trim), or every
phase would show the largest. The last line of a case is the process as a whole against the planner's figure, whose
share for libraries is a constant. Cases of two processes have only this line: the driver reads the high-water mark of
their workers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil

from tests.bench.frame import in_a_process, options, print_row, reset_high_water, status_bytes
from tests.bench.smollm2_shape import model_135m
from tests.bench.step_task import SIZES, make_task

_IMAGES = [  # one micro-batch in each pass
    "data.max_prompt_length=280", "data.max_pixels=200000", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4",
    "rollout.n=2", "actor.ppo_max_token_len_per_gpu=2500", "rollout.log_prob_max_token_len_per_gpu=5000",
]  # fmt: skip
_ALL = "model.gradient_checkpointing_layers=8"  # all layers of the model that `write_task` makes
CASES: dict[str, list[str]] = {
    "grpo": [_ALL],
    "no gradient checkpointing": ["model.enable_gradient_checkpointing=false"],
    "one micro-batch": [_ALL, "actor.ppo_max_token_len_per_gpu=2048", "data.train_batch_size=2"],
    "reference and entropy": [_ALL, "actor.use_kl_loss=true", "actor.calculate_entropy=true"],
    "critic": [_ALL, "critic.model.gradient_checkpointing_layers=8", "algorithm.adv_estimator=gae"],
    "adapter": [_ALL, "model.lora_rank=16"],
    "vllm": [_ALL, "rollout.name=vllm"],
    **{
        f"{family}, {name}": [*_IMAGES, *more]
        for family in ("qwen2_5_vl", "qwen3_vl")
        for name, more in {
            "frozen tower": [],
            "trained tower": ["actor.freeze_vision_tower=false"],
            "trained tower, nothing recomputed": [
                "actor.freeze_vision_tower=false", "model.enable_gradient_checkpointing=false"
            ],
        }.items()
    },
    **{
        f"long rows{name}": ["data.max_prompt_length=2048", "actor.ppo_max_token_len_per_gpu=2080",
        "data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=2", *more]
        for name, more in {
            "": [_ALL],
            ", 4 of 8 layers": ["model.gradient_checkpointing_layers=4"],
            ", no layer": ["model.enable_gradient_checkpointing=false"],
            ", offload": ["model.enable_activation_offload=true"],
            ", no layer, offload": [
                "model.enable_gradient_checkpointing=false", "model.enable_activation_offload=true"
            ],
        }.items()
    },
}  # fmt: skip
_135M = [
    "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=8", "data.max_prompt_length=64",
    "data.max_response_length=16", "actor.ppo_max_token_len_per_gpu=16384", "rollout.kv_cache_memory_mb=256",
]  # fmt: skip
_TWO = ["trainer.backend=ray", "trainer.n_gpus_per_node=2", "data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
_STORED = "model.enable_gradient_checkpointing=false"
_RECOMPUTED = "model.gradient_checkpointing_layers=30"
CASES |= {
    "135M": _135M,
    "135M, all layers recomputed": [*_135M, _RECOMPUTED],
    "135M, adapter": [*_135M, "model.lora_rank=16"],
    "135M, vllm": [*_135M, "rollout.name=vllm"],
    "135M, two processes": [*_135M, *_TWO],
    "135M, two processes, all layers recomputed": [*_135M, *_TWO, _RECOMPUTED],
    "135M, two processes, adapter": [*_135M, *_TWO, "model.lora_rank=16"],
    "1M": ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=8", _STORED],
    "12M": ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=8", "data.max_response_length=64",
            "actor.ppo_max_token_len_per_gpu=16384", _STORED],
}  # fmt: skip
PHASES = {
    "gen": "rollout",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "update_critic": "critic update",
    "update_actor": "update",
    "update_weights": "weight sync",
}
OPTIONS = [
    "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=0", "trainer.seed=1",
    "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.samples_max_mb=0", "rollout.name=hf",
    "rollout.n=4", "rollout.ignore_eos=true", "rollout.kv_cache_memory_mb=128", "data.train_batch_size=4",
    "data.max_prompt_length=96", "data.max_response_length=32", "actor.ppo_mini_batch_size=2",
    "actor.ppo_max_token_len_per_gpu=512", "reward.num_workers=1",
]  # fmt: skip
REWARD = f"reward.custom_reward_function.path={Path(__file__).parent / 'step_task.py'}"
WIDTHS = (26, 20, 12, 11, 20)


def main(argv: list[str]) -> int:
    """Prints a table for each case; exit status 1 where a prediction of memory is off by more than 15%."""
    given = options("plan_memory", __doc__, argv, only=list(CASES), steps=1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        head = ("case", "phase", "predicted", "measured", "predicted / measured")
        print_row(map("{:<{}}".format, head, WIDTHS), head=True)
        for name in given.only:
            found = _measured_case(name, Path(folder), given.steps)
            rows = {f"{phase}, MB": values for phase, values in found["phases"].items()}
            rows |= {"peak with libraries, MB": found["whole"]}
            for phase, (predicted, measured) in rows.items():
                worst = max(worst, abs(predicted / measured - 1))
                _print_comparison(name, phase, predicted / 1e6, measured / 1e6, decimals=0)
            for stage, (predicted, measured) in found["seconds"].items():
                _print_comparison(name, f"{stage}, s", predicted, measured, decimals=2)
            print(f"libraries {found['baseline'] / 1e6:.0f} MB, a core {found['flops'] / 1e9:.0f} GFLOP/s")
    print(f"largest deviation of a memory: {worst:.0%}")
    return int(worst > 0.15)


def _measured_case(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Writes the task of a case and runs it in a process of its own. Returns the result of `measure`."""
    run_dir = folder / f"run-{name.replace(' ', '-')}"
    if "_vl" in name:
        task = write_image_task(folder, name.partition(",")[0])
    elif name.startswith("135M"):
        task = _with_reward(folder, model_135m(folder / "135M"), _prompts("What is {number} + 60? Reply briefly."))
    elif name in ("1M", "12M"):
        [size] = [size for size in SIZES if size.name == name]
        (folder / name).mkdir()
        make_task(folder / name, size, size.lengths[0])
        task = [f"model.path={folder / name / 'model'}", f"data.train_files={folder / name / 'train.parquet'}", REWARD]
    else:
        task = write_task(folder, 1984 if name.startswith("long") else 76)
    argv = [*OPTIONS, *task, *CASES[name], f"trainer.total_training_steps={steps}"]
    return in_a_process("spawn", measure, [*argv, f"trainer.default_local_dir={run_dir}"], f"{run_dir}.log")


def _print_comparison(case: str, what: str, predicted: float, measured: float, *, decimals: int) -> None:
    numbers = (f"{predicted:.{decimals}f}", f"{measured:.{decimals}f}", f"{predicted / measured:.2f}")
    print_row(map("{:{}}".format, (case, what, *numbers), WIDTHS))


def _prompts(text: str) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": text.format(number=10 + row)}]} for row in range(64)]


def write_task(folder: Path, length: int) -> list[str]:
    """A model and prompts of so many characters, and the options that name them and a reward."""
    from tests.tiny_model import tiny_qwen2

    model = tiny_qwen2(folder / "model", vocab=16384, hidden=768, layers=8, heads=12, kv_heads=4, max_positions=4096)
    prompts = [{"prompt": [{"role": "user", "content": str(1000 + row) * (length // 4)}]} for row in range(32)]
    return _with_reward(folder, model, prompts)


def write_image_task(folder: Path, family: str) -> list[str]:
    """A vision-language model with a tower of 11 (qwen3_vl: 10) million parameters, and prompts with one image of 36 x
    28 patches, which are 252 tokens."""
    from tests.tiny_vision import image_file, tiny_vision_model

    sizes = {"depth": 8, "hidden_size": 320, "num_heads": 4, "intermediate_size": 856, "patch_size": 14}
    sizes |= {"window_size": 112} if family == "qwen2_5_vl" else {}
    model = tiny_vision_model(folder / family, family, hidden=256, heads=4, kv_heads=2, **sizes)
    prompts = []
    for row in range(8):
        image = folder / f"{row}.png"
        image.write_bytes(image_file(row, 36 * 14, 28 * 14))
        prompts.append({"prompt": [{"role": "user", "content": "<image>1+1"}], "images": [str(image)]})
    return _with_reward(folder, model, prompts)


def _with_reward(folder: Path, model: str, prompts: list[dict[str, Any]]) -> list[str]:
    other = {"data_source": "sums", "reward_model": {"ground_truth": ""}}
    (folder / "train.jsonl").write_text("".join(json.dumps(prompt | other) + "\n" for prompt in prompts))
    return [f"model.path={model}", f"data.train_files={folder / 'train.jsonl'}", REWARD]


def measure(argv: list[str], log: str) -> dict[str, Any]:
    """Runs the command, which prints into `log`.

    Returns, of the last step: `phases`, (predicted, measured) bytes by phase; `whole`, those of the fullest process
    with its libraries; `seconds`, (predicted, measured) by stage; `baseline`, bytes before the models are built;
    `flops`, the rate of a core. A run with workers in processes of their own has no phases and no seconds.
    """
    from trainer.cli import prepare_driver

    prepare_driver()
    from trainer.launch.ppo_job import run_ppo
    from trainer.observe.tracking import METRICS, read_metrics
    from trainer.planner.accelerators import ACCELERATORS, with_measured_rate
    from trainer.planner.memory import memory_plan
    from trainer.planner.memory_table import WORKER_BYTES
    from trainer.planner.networks import read_networks
    from trainer.planner.step_time import Lengths, step_stages
    from trainer.ray_trainer import RayPPOTrainer
    from trainer.recipe import recipe_overrides
    from verl_lite.config import PPOConfig, load_config

    slots = load_config(argv, recipe_loader=recipe_overrides).config.trainer.n_gpus_per_node or 1
    device = with_measured_rate(ACCELERATORS["cpu"])
    decided: list[PPOConfig] = []  # the launch sets what the command leaves to the plan
    measured: dict[str, int] = {}
    seconds: dict[str, float] = {}
    baseline: list[int] = []
    workers: list[int] = []

    class Watched(RayPPOTrainer):
        @classmethod
        def check_folder(cls, *arguments: Any) -> None:
            import_libraries()
            baseline.append(status_bytes("VmRSS"))

        @contextmanager
        def timed(self, name: str, within: str | None = None) -> Iterator[None]:
            if name not in PHASES:
                with super().timed(name, within):
                    yield
                return
            decided[:] = [self.config]
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            reset_high_water()
            started = time.process_time()
            with super().timed(name, within):
                yield
            seconds[PHASES[name]] = time.process_time() - started
            measured[PHASES[name]] = status_bytes("VmHWM") - baseline[0]
            workers[:] = [status_bytes("VmHWM", process) for process in _slot_processes()]

    with open(log, "w") as file, redirect_stdout(file):
        assert run_ppo(argv, Watched) == 0

    [config] = decided
    run_dir = Path(config.trainer.default_local_dir)
    last = list(read_metrics(run_dir / METRICS).values())[-1]
    # every answer has the maximum length, but some tasks have shorter prompts than their limit
    config.rollout.max_model_len = config.rollout.max_model_len or config.longest_sample
    config.data.max_prompt_length = int(last["prompt_length/max"])
    networks = read_networks(config)
    plan = memory_plan(config, networks, slots, device)
    result = {"baseline": baseline[0], "flops": device.flops}
    if slots > 1:
        return result | {"phases": {}, "seconds": {}, "whole": (plan.device_bytes, max(workers))}

    mean = Lengths(last["prompt_length/mean"], last["response_length/mean"])
    predicted, loaded_by_engine = plan.by_phase(), (plan.base or 0) - WORKER_BYTES
    phases = {name: (predicted[name] + loaded_by_engine, measured[name]) for name in measured}
    stages = step_stages(config, networks, slots, device, mean)
    generation = stages["generation: prompts"].seconds + stages["generation: answers"].seconds
    times = {"rollout": generation} | {name: stage.seconds for name, stage in stages.items()}
    compared = {
        name: (times[name], seconds[name]) for name in ("rollout", "old log-probs", "update") if name in seconds
    }
    whole = plan.device_bytes, baseline[0] + max(measured.values())
    return result | {"phases": phases, "seconds": compared, "whole": whole}


def _slot_processes() -> list[int]:
    """Returns the process ids of the run's workers."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "SlotProcess" in " ".join(child.cmdline())]


def import_libraries() -> None:
    """What building the models would import, but for vLLM, which loads most of its libraries while it is built."""
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401
