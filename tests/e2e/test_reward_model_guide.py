"""The guide to reward models: its commands run, and its sentences name keys that exist."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.tiny_model import tiny_qwen2
from trainer.main_ppo import main
from verl_lite.config import KEYS, PPOConfig, RewardTrainingConfig, schema_of

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "verl_lite" / "rewards" / "README.md").read_text().partition("## A reward model")[2]


def test_the_keys_of_the_guide_exist() -> None:
    named = set(re.findall(r"\b(?:reward|reward_model|algorithm|data|actor|rollout|trainer|model)(?:\.\w+)+", GUIDE))
    foreign = {"trainer.main_ppo"}
    foreign |= set(schema_of(RewardTrainingConfig).keys) | {"trainer.main_rm"}
    known = set(KEYS) | set(schema_of(PPOConfig).sections) | foreign | {"reward_failures.jsonl"}
    assert len(named) > 10 and not named - known


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_qwen2(tmp_path / "policy")
    rows = [{"data_source": "talk", "prompt": [{"role": "user", "content": f"{n}+{n}="}]} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [commands] = re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.DOTALL)
    filled = commands.replace("$POLICY", str(tmp_path / "policy")).replace("$PROMPTS", str(tmp_path / "prompts.jsonl"))
    words = shlex.split(filled.replace("\\\n", " "))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", words[3]])
    assert [words[:2], words[4:7]] == [["python", "-c"], ["python", "-m", "trainer.main_ppo"]]
    exec(words[2], {})
    assert main([*words[7:], "trainer.backend=inline", "trainer.device=cpu"]) == 0
    logged = tmp_path / "runs" / "verl_lite" / "reward_model" / "metrics.jsonl"
    steps = [json.loads(line)["data"] for line in logged.read_text().splitlines()]
    steps = [step for step in steps if "actor/pg_loss" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["critic/score/mean"] == pytest.approx(step["reward/model/mean"], abs=1e-6)  # fp32
        assert step["reward/model/min"] < step["reward/model/max"]
    assert steps[0]["reward/model/mean"] != steps[1]["reward/model/mean"]
