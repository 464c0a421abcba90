"""The template of the workers: started early for runs that can fork them, with the variables of the workers."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from trainer.launch import ppo_job, resources, start
from trainer.observe.console import Console
from verl_lite.config import load_config
from verl_lite.single_controller import ClassWithInitArgs
from workers.roles.critic import CriticWorker


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ("trainer.backend=ray", True),
        ("trainer.backend=ray trainer.n_gpus_per_node=1", True),
        ("trainer.backend=inline", False),
        ("trainer.backend=ray trainer.dry_run=true", False),
        ("trainer.backend=ray trainer.device=cuda", False),
        ("trainer.backend=ray ray_kwargs.ray_init.address=head:6379", False),
    ],
)
def test_the_template_gets_the_variables_of_the_workers(
    options: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates: list[Any] = []
    groups: list[Any] = []
    monkeypatch.setattr(start, "worker_template_running", lambda env: nullcontext(templates.append(env)))
    monkeypatch.setattr(start, "list_gpus", lambda: None)
    monkeypatch.setattr(resources, "create_worker_groups", lambda *args, env, **_: groups.append(env) or {})
    names: list[str] = []
    monkeypatch.setattr(resources, "preload", lambda *modules: names.extend(modules))
    config = load_config(["model.path=m", "data.train_files=t", *options.split()]).config
    with ExitStack() as stack:
        start.start_template(config, stack)
    assert len(templates) == starts
    if starts:
        resources.resolve_slots(config)
        recipe = ClassWithInitArgs(CriticWorker, config, 1)
        resources.create_groups(config, [config.trainer.n_gpus_per_node or 0], {"critic": recipe}, [], Path("logs"))
        assert groups == templates and "OMP_NUM_THREADS" in groups[0] and names == ["workers.roles.critic"]
        monkeypatch.setattr(start, "list_gpus", lambda: ["a GPU"])
        start.start_template(config, stack)
        assert len(templates) == 1


@pytest.mark.parametrize(("engine", "more"), [("hf", []), ("vllm", ["workers.engines.vllm_engine:import_vllm"])])
def test_the_template_imports_the_engine_that_the_run_has(
    engine: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(ppo_job, "preload", lambda *modules: names.extend(modules))
    (file := tmp_path / "t.jsonl").touch()
    words = f"model.path=m data.train_files={file} trainer.n_gpus_per_node=1 rollout.name={engine} rollout.n=2"
    ppo_job.PPOJob(load_config(words.split()).config, 1, Console(verbosity="quiet")).check(None)
    assert names == ["workers.roles.actor_rollout", *more]
