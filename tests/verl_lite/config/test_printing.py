"""What is printed can be read back: the same values, each line with its source, and a reference of every key."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.config import (
    KEYS,
    LoadedConfig,
    PPOConfig,
    help_config,
    help_text,
    load_config,
    print_config,
    save_config,
)
from verl_lite.errors import UserError

ARGUMENTS = [
    "model.path=m",
    "data.train_files=[a.parquet,'b,c.parquet']",
    "actor.optim.lr=2e-5",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.experiment_name='1e-6'",
    "trainer.project_name=12:30",
    "+rollout.engine_kwargs.vllm.compilation_config={level: 3, sizes: [1, 2], name: 'yes'}",
    "+rollout.engine_kwargs.vllm.empty={}",
    "data.apply_chat_template_kwargs={a.b: 'x # y'}",
    r'reward.reward_kwargs.text="a: b\n\"c\""',
    "data.seed=${actor.ppo_mini_batch_size}",
]


def reload(loaded: LoadedConfig[PPOConfig], folder: Path) -> LoadedConfig[PPOConfig]:
    return load_config(["--config", str(save_config(loaded, folder / "run" / "config.yaml"))])


def test_a_saved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    loaded = load_config(ARGUMENTS)
    again = reload(loaded, tmp_path)
    assert dataclasses.asdict(again.config) == dataclasses.asdict(loaded.config)
    assert again.config.reward.reward_kwargs == {"text": 'a: b\n"c"'}
    assert again.config.data.apply_chat_template_kwargs == {"a.b": "x # y"}
    assert again.config.trainer.experiment_name == "1e-6"
    assert again.config.data.seed == 256
    assert set(again.provenance.values()) == {f"file:{tmp_path / 'run' / 'config.yaml'}", "default"}


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]) | st.just("\n"), max_size=12)
plain = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | texts
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, min_size=1, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(value=st.lists(values, min_size=4, max_size=8), name=texts)
def test_any_value_reads_back_the_same(value: object, name: str) -> None:
    loaded = load_config([])
    loaded.config.reward.reward_kwargs = {"value": value}
    loaded.config.trainer.project_name = name
    with tempfile.TemporaryDirectory() as folder:
        again = reload(loaded, Path(folder))
    assert again.config.reward.reward_kwargs == {"value": value}
    assert again.config.trainer.project_name == name


def test_each_line_tells_where_its_value_comes_from() -> None:
    lines = print_config(load_config(ARGUMENTS)).splitlines()
    by_start = {line.split("#")[0].strip(): line.split("# ")[-1] for line in lines if "#" in line}
    assert by_start["lr: 2.0e-05"] == "command line"
    assert by_start["use_dynamic_bsz: false"] == "implied by actor.ppo_micro_batch_size_per_gpu"
    assert by_start["seed: 256"] == "command line"
    assert by_start["eps: 1.0e-08"] == "default"
    assert by_start["level: 3"] == "command line"
    assert lines[0].startswith("# actor.use_dynamic_bsz=false, because")
    values = [line for line in lines if not line.startswith("#") and not line.split("#")[0].strip().endswith(":")]
    assert all(" # " in line for line in values)
    assert len(values) >= len(KEYS)


def test_what_was_filled_in_after_loading_says_so() -> None:
    loaded = load_config([])
    loaded.config.trainer.n_gpus_per_node = 2
    loaded.config.data.train_files.append("made.parquet")
    lines = [line for line in print_config(loaded).splitlines() if line.endswith("# filled in at launch")]
    assert [line.split("#")[0].strip() for line in lines] == ["n_gpus_per_node: 2", "train_files: [made.parquet]"]


def test_the_reference_lists_every_key_with_default_and_sentence() -> None:
    text = help_config()
    for name, key in KEYS.items():
        assert f"  {name} = " in text
        assert key.doc.split()[0] in text
    assert "actor.optim.lr = 1.0e-06   (float)" in text
    assert "data.seed = null   (int or null)" in text
    assert '= "runs/${trainer.project_name}/${trainer.experiment_name}"   (str)' in text
    assert "trainer.logger = [console, jsonl, tensorboard]   (list of str)" in text


def test_help_is_one_screen_and_the_reference_can_be_cut() -> None:
    screen = help_text(load_config(["--help"]))
    assert len(screen.splitlines()) <= 45 and "--help-config" in screen and "actor.optim.lr = " in screen
    part = help_text(load_config(["--help-config", "actor.optim"]))
    assert "actor.optim.eps" in part and "critic.optim.eps" not in part
    with pytest.raises(UserError, match="actor.optim.lr"):
        help_text(load_config(["--help-config=actor.optim.lrr"]))
