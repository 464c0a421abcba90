"""A whole run on images: PPO with critic and reference, validation, reward of images, exact resume, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_model import tiny_reward_model
from tests.tiny_run import write_rows
from tests.tiny_vision import image_file, tiny_vision_model
from tests.trainer.tiny_run import options_of, run, samples
from trainer.export import main as export
from trainer.launch.ppo_job import run_ppo
from trainer.main_eval import main as evaluate
from verl_lite.errors import UserError

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, images):
    assert len(images) == extra_info["images"]
    return (sum(map(ord, solution_str)) + sum(image.getpixel((0, 0))[0] for image in images)) % 7 / 7
"""
OPTIONS = (
    "algorithm.adv_estimator=gae",
    "actor.use_kl_loss=true",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "data.max_prompt_length=60",
    "data.filter_overlong_prompts=true",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision_model(folder / "policy")
    tiny_reward_model(folder / "reward_model")
    rows = []
    for number in range(10):
        (folder / f"{number}.png").write_bytes(image_file(number))
        count = (1, 0, 2)[number % 3]
        rows.append(
            {
                "data_source": "pictures",
                "prompt": [{"role": "user", "content": "<image>" * count + f"{number}?"}],
                "reward_model": {"ground_truth": "0"},
                "extra_info": {"images": count},
                "images": [f"{number}.png", "0.png"][:count],
            }
        )
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    return folder


def numbers(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics that do not depend on time and memory."""
    timed = ("perf/", "timing", "rollout/", "weight_sync", "reward/processes", "seconds")
    steps = [step for step in steps if "training/global_step" in step]
    return [{name: x for name, x in step.items() if not any(part in name for part in timed)} for step in steps]


@pytest.mark.slow
def test_a_run_on_images_resumes_bit_for_bit_and_is_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"data.val_files={folder}/prompts.jsonl", "trainer.total_training_steps=4"]
    whole = run(folder, "whole", *OPTIONS, *files)
    assert "val: 10 prompts of" in capsys.readouterr().out
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/whole/global_step_2"]
    again = run(folder, "again", *OPTIONS, *files, *resume)
    assert len(numbers(whole)) == 4 and numbers(again) == numbers(whole)[2:]
    last = numbers(whole)[-1]
    assert last["reward/error_rate"] == 0 and last["critic/grad_norm"] > 0 and "val-core/pictures/reward/mean@1" in last
    for step in (3, 4):
        assert [row["output"] for row in samples(folder, "again", step)] == [
            row["output"] for row in samples(folder, "whole", step)
        ]
    assert (
        evaluate(
            [
                f"{folder}/whole",
                "rollout.val_kwargs.n=2",
                "rollout.val_kwargs.do_sample=true",
                "rollout.val_kwargs.temperature=1.0",
            ]
        )
        == 0
    )
    assert export([f"{folder}/whole", "--out", f"{folder}/hf"]) == 0
    assert (folder / "hf" / "preprocessor_config.json").is_file()
    assert json.loads((folder / "hf" / "config.json").read_text())["model_type"] == "qwen2_5_vl"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("reward_model.enable=true", "a reward model reads only text"),
        ("actor.ulysses_sequence_parallel_size=2", "has a vision tower, whose features are not shared; set 1"),
        ("rollout.name=tests.e2e.sleeping_engine:SleepingEngine", "this engine does not read Request.images"),
    ],
)
def test_parts_that_cannot_read_images_are_refused(folder: Path, option: str, message: str) -> None:
    more = ["trainer.n_gpus_per_node=2", "trainer.backend=ray", f"reward_model.model.path={folder}/reward_model"]
    with pytest.raises(UserError, match=message):
        run_ppo([*options_of(folder, "refused"), *more, option])
