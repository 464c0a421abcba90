"""Predicted against measured memory of a training step on the CPU, phase by phase.

`python -m tests.bench plan_memory [--only NAME ...] [--steps 2]`. Each case is a run of the main command in a process
of its own (`trainer.backend=inline`: driver and worker are one process) on a random Qwen2 of 81 million parameters in
fp32. Measured: the highest resident memory within a phase of the last step (VmHWM, reset at its begin), less the
resident memory just before the models are built (Python, libraries, data). Predicted: `planner.memory.memory_plan`
from the same options and the model's config.json; with vLLM also its libraries, a constant. The C library keeps freed
memory for the next tensor; it is given back at the begin of each phase (malloc_trim), or every phase would show the
largest. The last line of a case is the process as a whole against the planner's figure, whose share for libraries is a
constant.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from tests.bench.frame import in_a_process, options, print_row, reset_high_water, status_bytes

_IMAGES = [  # one micro-batch in each pass
    "data.max_prompt_length=280", "data.max_pixels=200000", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4",
    "rollout.n=2", "actor.ppo_max_token_len_per_gpu=2500", "rollout.log_prob_max_token_len_per_gpu=5000",
]  # fmt: skip
CASES: dict[str, list[str]] = {
    "grpo": [],
    "no gradient checkpointing": ["model.enable_gradient_checkpointing=false"],
    "one micro-batch": ["actor.ppo_max_token_len_per_gpu=2048", "data.train_batch_size=2"],
    "reference and entropy": ["actor.use_kl_loss=true", "actor.calculate_entropy=true"],
    "critic": ["algorithm.adv_estimator=gae"],
    "adapter": ["model.lora_rank=16"],
    "vllm": ["rollout.name=vllm"],
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
            "": [],
            ", 4 of 8 layers": ["model.gradient_checkpointing_layers=4"],
            ", no layer": ["model.enable_gradient_checkpointing=false"],
            ", offload": ["model.enable_activation_offload=true"],
            ", no layer, offload": [
                "model.enable_gradient_checkpointing=false", "model.enable_activation_offload=true"
            ],
        }.items()
    },
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
WIDTHS = (26, 20, 12, 11, 20)


def main(argv: list[str]) -> int:
    """Prints a table for each case; exit status 1 where a prediction is off by more than 20%."""
    given, worst = options("plan_memory", __doc__, argv, only=list(CASES), steps=1), 0.0
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        head = ("case", "phase", "predicted MB", "measured MB", "predicted / measured")
        print_row(map("{:<{}}".format, head, WIDTHS), head=True)
        for name in given.only:
            run_dir = Path(folder) / f"run-{name.replace(' ', '-')}"
            family = name.partition(",")[0] if "_vl" in name else ""
            length = 1984 if name.startswith("long") else 76
            task = write_image_task(Path(folder), family) if family else write_task(Path(folder), length)
            argv = [*OPTIONS, *task, *CASES[name], f"trainer.total_training_steps={given.steps}"]
            found = in_a_process("spawn", measure, [*argv, f"trainer.default_local_dir={run_dir}"], f"{run_dir}.log")
            worst = max(worst, *(abs(predicted / measured - 1) for predicted, measured in found["phases"].values()))
            for phase, (predicted, measured) in {**found["phases"], "peak with libraries": found["whole"]}.items():
                numbers = (predicted / 1e6, measured / 1e6, predicted / measured)
                cells = (name, phase, *map("{:.{}f}".format, numbers, (0, 0, 2)))
                print_row(map("{:{}}".format, cells, WIDTHS))
            print(f"libraries {found['baseline'] / 1e6:.0f} MB")
    print(f"largest deviation of a phase: {worst:.0%}")
    return int(worst > 0.2)


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
    reward = Path(__file__).parent / "step_task.py"
    return [
        f"model.path={model}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"reward.custom_reward_function.path={reward}",
    ]


def measure(argv: list[str], log: str) -> dict[str, Any]:
    """Runs the command, which prints into `log`; gives (predicted, measured) bytes by phase, of the last step."""
    from trainer.cli import prepare_driver

    prepare_driver()
    from trainer.build import run_ppo
    from trainer.planner.accelerators import ACCELERATORS
    from trainer.planner.memory import memory_plan, read_networks
    from trainer.ray_trainer import RayPPOTrainer
    from trainer.recipe import recipe_overrides
    from trainer.resources import WORKER_BYTES
    from verl_lite.config import load_config

    config = load_config(argv, recipe_loader=recipe_overrides).config
    plan = memory_plan(config, read_networks(config), 1, ACCELERATORS["cpu"])
    measured: dict[str, int] = {}
    baseline = []

    class Watched(RayPPOTrainer):
        @classmethod
        def check_folder(cls, *arguments: Any) -> None:
            import_libraries()
            baseline.append(status_bytes("VmRSS"))

        @contextmanager
        def timed(self, name: str, within: str | None = None) -> Iterator[None]:
            if name in PHASES:
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                reset_high_water()
            with super().timed(name, within):
                yield
            if name in PHASES:
                measured[PHASES[name]] = status_bytes("VmHWM") - baseline[0]

    with open(log, "w") as file, redirect_stdout(file):
        assert run_ppo(argv, Watched) == 0
    predicted, loaded_by_engine = plan.by_phase(), (plan.base or 0) - WORKER_BYTES
    phases = {name: (predicted[name] + loaded_by_engine, measured[name]) for name in measured}
    whole = plan.device_bytes, baseline[0] + max(measured.values())
    return {"phases": phases, "whole": whole, "baseline": baseline[0]}


def import_libraries() -> None:
    """What building the models would import, but for vLLM, which loads most of its libraries while it is built."""
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401
