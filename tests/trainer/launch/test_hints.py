"""Every command that a run recommends is executed, and so is each that these commands recommend."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.hints import commands_in, execute
from tests.tiny_model import tiny_qwen2
from tests.trainer import tiny_run
from tests.workers.counting_env import Counting
from trainer import main_rm, main_sft
from trainer.inspect import main as inspect
from trainer.launch.ppo_job import run_ppo

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if sum(map(ord, solution_str)) % 2 == 0:
        raise ValueError("a fault of the reward")
    return len(solution_str) / 9
"""


def executed(text: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Executes what the text recommends, and what these commands recommend; returns the modules."""
    seen: dict[str, tuple[str, list[str]]] = {}
    waiting = commands_in(text)
    while waiting:
        module, words = waiting.pop()
        if seen.setdefault(shlex.join([module, *words]), (module, words)) == (module, words) and words:
            capsys.readouterr()
            execute(module, words)
            new = commands_in(capsys.readouterr().out)
            waiting += [one for one in new if shlex.join([one[0], *one[1]]) not in seen and one not in waiting]
    return {module for module, _ in seen.values()}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_run_with_validation(sampled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A greedy validation, by default: several answers to a prompt have to be sampled."""
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"], REWARD)
    options = [
        *tiny_run.options_of(tmp_path), f"data.val_files={tmp_path}/prompts.jsonl", "trainer.save_freq=-1",
        "trainer.logger=[console,jsonl]", "trainer.total_training_steps=1",
        "reward.max_error_rate=1.0",
    ]  # fmt: skip
    if sampled:
        options += ["rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=0.7"]
    run_ppo(options)
    output = capsys.readouterr()
    assert inspect([str(tmp_path / "run")]) == 0
    text = output.out + output.err + capsys.readouterr().out
    found = executed(text, capsys)
    assert found >= {f"trainer.{name}" for name in ("report", "main_eval", "export", "score")}
    guide = (ROOT / "trainer" / "EVALUATION.md").read_text()
    [first] = re.findall(r"```bash\npython -m trainer.main_eval runs/verl_lite/RUN (.*?)  +#", guide, re.DOTALL)
    execute("trainer.main_eval", [str(tmp_path / "run"), *shlex.split(first.replace("\\\n", " "))])


def test_a_run_without_validation_recommends_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"])
    run_ppo([*tiny_run.options_of(tmp_path), "trainer.save_freq=-1", "trainer.total_training_steps=1"])
    found = executed(capsys.readouterr().out, capsys)
    assert found >= {"trainer.report", "trainer.export"} and "trainer.main_eval" not in found


@pytest.mark.parametrize("val_tags", ["[]", "[count]"])
def test_a_run_of_agents(val_tags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Environments give the rewards, so nothing recommends to score the answers again."""
    options = [
        "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", f"model.path={tiny_qwen2(tmp_path / 'm')}",
        "data.max_prompt_length=48", "data.max_response_length=96", "actor.ppo_mini_batch_size=2",
        "trainer.logger=[console,jsonl]", "trainer.total_training_steps=1", "agentic.train_env_manager.tags=[count]",
        f"agentic.custom_envs.count={{env_type: {Counting.__module__}:Counting, max_steps: 2, max_tokens_per_step: 4}}",
        "agentic.train_env_manager.num_env_groups=1", "agentic.train_env_manager.group_size=2",
        "agentic.rollout_batch_size=2", "agentic.env_pool.num_workers=0", f"agentic.val_env_manager.tags={val_tags}",
        "agentic.val_batch_size=2", f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    run_ppo(options)
    found = executed(capsys.readouterr().out, capsys)
    assert {"trainer.report", "trainer.export"} <= found and ("trainer.main_eval" in found) == (val_tags != "[]")


def test_every_command_that_the_code_names_is_there() -> None:
    tops = ("trainer", "verl_lite", "workers", "recipes")
    sources = [path.read_text() for top in tops for path in (ROOT / top).rglob("*.py")]
    modules = {module.rstrip(".") for text in sources for module, _ in commands_in(text)}
    assert len(modules) > 10
    for module in modules:
        spec = importlib.util.find_spec(module)
        spec = importlib.util.find_spec(f"{module}.__main__") if spec and spec.submodule_search_locations else spec
        assert spec is not None and spec.origin is not None, module
        assert "main(" in Path(spec.origin).read_text(), module


@pytest.mark.parametrize("main", [main_sft.main, main_rm.main])
def test_training_without_a_rollout(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training of a policy that it recommends is a dry run here."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "response": "2", "chosen": "2", "rejected": "3"}\n')
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"], max_positions=1024)
    files = [f"model.path={tmp_path}/policy", f"data.train_files={tmp_path}/rows.jsonl"]
    run = ["trainer.device=cpu", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=1"]
    assert main([*files, *run]) == 0
    commands = dict(commands_in(capsys.readouterr().out))
    execute("trainer.report", commands.pop("trainer.report"))
    places = {"=FILE": f"={tmp_path}/prompts.jsonl", "=POLICY": f"={tmp_path}/policy"}
    small = ["trainer.dry_run=true", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", *run[:1]]
    small += [f"reward.custom_reward_function.path={tmp_path}/reward.py", f"trainer.default_local_dir={tmp_path}/next"]
    for module, words in commands.items():
        execute(module, [re.sub("=(FILE|POLICY)$", lambda found: places[found[0]], word) for word in words] + small)
