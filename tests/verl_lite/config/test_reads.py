"""What the user set and nothing reads is found: on the driver, in workers that get a pickled configuration, at once and
at the end."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from verl_lite.config import (
    LoadedConfig,
    PPOConfig,
    handed_over,
    idle_options,
    load_config,
    option_reads,
    print_config,
    record_reads,
    uncounted,
)
from verl_lite.config.checks import validate
from verl_lite.single_controller.worker import Worker
from workers.rollout.base import engine_names


@pytest.fixture
def loaded() -> LoadedConfig[PPOConfig]:
    given = ["actor.tau_pos=3", "actor.optim.lr=1e-4", "trainer.max_actor_ckpt_to_keep=2", "rollout.n=8"]
    loaded = load_config(["model.path=m", *given, "reward.reward_kwargs.a=1", "data.seed=null", "trainer.save_freq=5"])
    record_reads(loaded.config)
    return loaded


def test_what_nothing_read_is_one_line_and_later_reads_wait_for_the_end(loaded: LoadedConfig[PPOConfig]) -> None:
    config = loaded.config
    assert (config.actor.optim.lr, config.rollout.n, config.model.path) == (1e-4, 8, "m")
    line = idle_options(loaded)
    assert line is not None and "actor.tau_pos=3" in line and "reward.reward_kwargs={a: 1}" in line
    assert "lr" not in line and "seed" not in line and "ckpt" not in line  # read, a default, read at a save
    assert "trainer.max_actor_ckpt_to_keep=2" in (idle_options(loaded, at_end=True) or "")
    assert "tau_pos" not in (idle_options(loaded, [{"actor.tau_pos"}]) or ""), "a worker has read it"
    handed_over(config.reward)
    assert "reward_kwargs" not in (idle_options(loaded) or "")


def test_a_command_that_adds_options_reports_those_that_the_user_typed(tmp_path: Path) -> None:
    """As main_eval, which takes the saved run's options and switches training off. verl's names count as ours."""
    for name in ("run", "mine"):
        (tmp_path / f"{name}.yaml").write_text("actor: {tau_pos: 3}\n" if name == "run" else "actor: {tau_neg: 3}\n")
    mine, added = f"{tmp_path}/mine.yaml", ["model.path=m", "trainer.save_freq=7", f"--config={tmp_path}/run.yaml"]
    typed = ["actor_rollout_ref.rollout.n=3", "++trainer.save_freq=8", "eval_steps=9", "--config", mine]
    loaded = load_config([*added, *typed])
    record_reads(loaded.config)
    everything = idle_options(loaded, at_end=True) or ""
    assert "tau_pos" in everything and "save_freq" in everything
    loaded.typed = typed
    shown = (idle_options(loaded, at_end=True) or "").partition("): ")[2].split(", ")
    assert sorted(shown) == ["actor.tau_neg=3.0", "rollout.n=3", "trainer.save_freq=8", "trainer.test_freq=9"]


def test_checks_printing_and_comparing_saved_settings_do_not_count(loaded: LoadedConfig[PPOConfig]) -> None:
    before = option_reads()
    text = print_config(loaded)
    with pytest.raises(ValueError):
        validate(loaded.config, engines=engine_names())
    with uncounted():
        assert dataclasses.asdict(loaded.config)["actor"]["tau_pos"] == 3
    assert option_reads() == before and "tau_pos: 3.0" in text


def test_values_stay_what_they_are(loaded: LoadedConfig[PPOConfig]) -> None:
    config = loaded.config
    for other in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert (other.actor.tau_pos, other.model.path) == (3, "m")
    config.actor.tau_neg = 7.0
    assert (config.actor.tau_neg, dataclasses.replace(config.actor, tau_pos=4.0).tau_neg) == (7.0, 7.0)


def test_a_process_that_gets_the_configuration_notes_its_own_reads(loaded: LoadedConfig[PPOConfig]) -> None:
    code = (
        "import pickle, sys; config = pickle.load(sys.stdin.buffer); config.actor.tau_pos\n"
        "from verl_lite.single_controller.worker import Worker; print(sorted(Worker().option_reads()))"
    )
    sent = pickle.dumps(loaded.config)
    out = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert out.stdout.decode().strip() == "['actor', 'actor.tau_pos']"
    assert Worker().option_reads() == option_reads()
