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

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.reward_flow_live import reset_high_water, status_bytes

CASES: dict[str, list[str]] = {
    "grpo": [],
    "no gradient checkpointing": ["model.enable_gradient_checkpointing=false"],
    "one micro-batch": ["actor.ppo_max_token_len_per_gpu=2048", "data.train_batch_size=2"],
    "reference and entropy": ["actor.use_kl_loss=true", "actor.calculate_entropy=true"],
    "critic": ["algorithm.adv_estimator=gae"],
    "adapter": ["model.lora_rank=16"],
    "vllm": ["rollout.name=vllm"],
}
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
RESULT = "PLAN_MEMORY_RESULT"


def main(argv: list[str]) -> int:
    """Prints a table for each case; exit status 1 where a prediction is off by more than 20%."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench plan_memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args(argv)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        options = write_task(Path(folder))
        print(f"| {'case':26} | {'phase':20} | predicted MB | measured MB | predicted / measured |")
        print("|---|---|---|---|---|")
        for name in given.only:
            argv = [*OPTIONS, *options, *CASES[name], f"trainer.total_training_steps={given.steps}"]
            found = in_a_process([*argv, f"trainer.default_local_dir={folder}/run-{name.replace(' ', '-')}"])
            worst = max(worst, *(abs(predicted / measured - 1) for predicted, measured in found["phases"].values()))
            for phase, (predicted, measured) in {**found["phases"], "peak with libraries": found["whole"]}.items():
                numbers = f"{predicted / 1e6:12.0f} | {measured / 1e6:11.0f} | {predicted / measured:20.2f} |"
                print(f"| {name:26} | {phase:20} | {numbers}", flush=True)
            print(f"libraries {found['baseline'] / 1e6:.0f} MB")
    print(f"largest deviation of a phase: {worst:.0%}")
    return int(worst > 0.2)


def write_task(folder: Path) -> list[str]:
    """A model and data, and the options that name them and a reward."""
    from tests.tiny_model import tiny_qwen2

    model = tiny_qwen2(folder / "model", vocab=16384, hidden=768, layers=8, heads=12, kv_heads=4)
    other = {"data_source": "sums", "reward_model": {"ground_truth": ""}}
    prompts = [{"prompt": [{"role": "user", "content": str(1000 + row) * 19}], **other} for row in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    reward = Path(__file__).parent / "step_task.py"
    return [
        f"model.path={model}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"reward.custom_reward_function.path={reward}",
    ]


def in_a_process(argv: list[str]) -> dict[str, Any]:
    """The result of `measure` with these options."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tests.bench.plan_memory import measure; measure(sys.argv[1:])", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith(RESULT)), None)
    if line is None:
        raise RuntimeError(f"the run ended without a result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return found


def measure(argv: list[str]) -> None:
    """Runs the command and prints (predicted, measured) bytes by phase, of the last step."""
    from trainer.cli import prepare_driver

    prepare_driver()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from trainer.build import run_ppo
    from trainer.planner.memory import ACCELERATORS, memory_plan, read_networks
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

    assert run_ppo(argv, Watched) == 0
    predicted, loaded_by_engine = plan.by_phase(), (plan.base or 0) - WORKER_BYTES
    phases = {name: (predicted[name] + loaded_by_engine, measured[name]) for name in measured}
    whole = plan.device_bytes, baseline[0] + max(measured.values())
    print(RESULT + json.dumps({"phases": phases, "whole": whole, "baseline": baseline[0]}))


def import_libraries() -> None:
    """What building the models would import, but for vLLM, which loads most of its libraries while it is built."""
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
