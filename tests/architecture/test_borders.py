"""What travels between folders has a type: `Any` in a public signature needs a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.test_imports import ROOT

STATES = "a state in a checkpoint; verl_lite.machine.safe_state lists the types that it may contain"
JSON = "a value of a file or message in JSON, whose shape the function checks"
NAMED_BY_USER = "an object that the user names: a function, a class or a module"
VERL = "verl's interface, whose arguments and results the caller chooses"
TRAINER_OF_JOB = "the trainer or the task that the job of a command builds and alone uses"
STEP_DATA = "the data of a step, whose type each subclass of TrainingLoop chooses"
OF_COMMAND = "the options of a command, whose dataclass only the row of the table names"
FORWARDED = "arguments that are passed on unchanged"
LIBRARY = "a type of an optional library, or the signature of a method that it calls"

REASONS = {
    STATES: [
        "verl_lite/machine/safe_state.py read_state",
        "trainer/checkpoint/files.py read_state",
        "trainer/checkpoint/resume.py flat_config",
        "trainer/loop/saving.py Saver.restore",
        "trainer/loop/steps.py StepCounter.state_dict",
        "trainer/loop/steps.py StepCounter.load_state_dict",
        "trainer/loop/steps.py EpochSteps.state_dict",
        "trainer/loop/training_loop.py TrainingLoop.state_dict",
        "trainer/loop/training_loop.py TrainingLoop.load_state_dict",
        "trainer/ray_trainer.py RayPPOTrainer.state_dict",
        "trainer/ray_trainer.py RayPPOTrainer.load_state_dict",
        "trainer/rollout/training_steps.py TrainingSteps.state_dict",
        "trainer/rollout/training_steps.py TrainingSteps.load_state_dict",
    ],
    JSON: [
        "verl_lite/sandbox/values.py decode",
        "verl_lite/sandbox/values.py fields",
        "trainer/data/chats.py without_nulls",
        "trainer/data/sources.py parse_json",
    ],
    NAMED_BY_USER: [
        "verl_lite/registry.py object_at",
        "verl_lite/registry.py load_object",
        "verl_lite/registry.py object_of",
        "verl_lite/visual_rewards/base.py VisualReward.score",
        "verl_lite/visual_rewards/identity.py make_part",
        "workers/diffusion/pipeline.py component_class",
        "workers/pool/process.py Process.receive",
    ],
    VERL: [
        "verl_lite/rewards/registry.py default_compute_score",
        "verl_lite/single_controller/resource_pool.py ServiceHandle.call",
        "verl_lite/single_controller/worker_group.py WorkerGroup.execute_all_async",
        "verl_lite/single_controller/worker_group.py WorkerGroup.execute_all_sync",
        "verl_lite/single_controller/worker_group.py WorkerGroup.execute_rank_zero_async",
        "verl_lite/single_controller/worker_group.py WorkerGroup.execute_rank_zero_sync",
    ],
    TRAINER_OF_JOB: [
        "trainer/diffusion/reward_flow.py RewardFlowJob.report",
        "trainer/launch/ppo_job.py PPOJob.report",
        "trainer/launch/run.py Job.build",
        "trainer/launch/run.py Job.report",
        "trainer/launch/run.py run",
        "trainer/launch/run.py print_report",
        "trainer/supervised/loop.py SupervisedJob.read_task",
    ],
    STEP_DATA: [
        "trainer/loop/training_loop.py TrainingLoop.training_steps",
        "trainer/loop/training_loop.py TrainingLoop.train_step",
    ],
    OF_COMMAND: [
        "verl_lite/config/conflicts/commands.py table_of",
        "verl_lite/config/idle_options/conditions.py if_config",
    ],
    FORWARDED: [
        "trainer/agentic/agent_trainer.py AgentTrainer.__init__",
        "trainer/agentic/agent_trainer.py program_parts",
        "trainer/agentic/agent_trainer.py episode_parts",
        "trainer/agentic/roll.py AgenticPipeline.__init__",
        "trainer/launch/build.py sample_parts",
        "trainer/observe/console.py Terminal.render_str",
    ],
    LIBRARY: [
        "verl_lite/rewards/limited_http.py LimitedBody.__init__",
        "verl_lite/rewards/limited_http.py limited_client",
        "workers/engine/network.py EngineNetwork.prepare_inputs",
        "trainer/diffusion/clips/reading.py require_av",
    ],
}
"""Public functions with `Any` in their signature, by reason."""


def with_any(path: Path) -> Iterator[str]:
    """Yields the public functions and methods of a file that have `Any` in their signature."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public_classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for prefix, body in [("", tree.body), *((f"{node.name}.", node.body) for node in public_classes)]:
        for node in body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (not node.name.startswith("_") or node.name == "__init__") and _mentions_any(node):
                yield f"{path.relative_to(ROOT)} {prefix}{node.name}"


def _mentions_any(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [parameter.annotation for parameter in parameters if parameter is not None]
    for annotation in [*annotations, function.returns]:
        nodes = ast.walk(annotation) if annotation is not None else ()
        if any(isinstance(node, ast.Name) and node.id == "Any" for node in nodes):
            return True
    return False


def test_any_in_a_public_signature_has_a_reason() -> None:
    written = set()
    for folder in ("verl_lite", "workers", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            written.update(with_any(path))
    explained = {name for names in REASONS.values() for name in names}
    assert not written - explained, "give these signatures types (object, a Protocol, a TypedDict), or add a reason"
    assert not explained - written, "these have types now; remove them from the table"
