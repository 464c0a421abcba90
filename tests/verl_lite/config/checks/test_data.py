"""Options of the data that do not fit each other or name nothing: refused before anything is read, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import PPOConfig, load_config
from verl_lite.config.checks.data import data

HERE = str(Path(__file__))


def problems(**options: Any) -> list[str]:
    """options: names below data, with __ for dots."""
    config = PPOConfig()
    config.data.train_files = ["openai/gsm8k:main@train"]
    for name, value in options.items():
        *path, leaf = name.split("__")
        section: Any = config.data
        for part in path:
            section = getattr(section, part)
        setattr(section, leaf, value)
    return list(data(config))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train_files": ["openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k@test", str(Path(HERE).parent)]},
        {"train_files": [f"{Path(HERE).parent}:main@train", f"{Path(HERE).parent}@train"]},
        {"train_files": ["anything"], "custom_cls__path": HERE, "custom_cls__name": "Rows"},
        {"columns": {"prompt": ["question", "problem"], "ground_truth": "answer", "n": None, "extra_info": ["level"]}},
        {"prompt_template": "{prompt}\n", "system_prompt": "be kind", "ground_truth_regex": "#### (.+)"},
        {"sources": {"a": {"weight": 2, "n": 4}, "b": {"weight": 0.5}}},
        {"sources": {"a": {"n": 4}, "b": {"n": 2}}},
        {"sampler__class_path": "pkg://my.samplers", "sampler__class_name": "Mine"},
        {"tools_path": HERE},
    ],
)
def test_what_fits_is_no_problem(options: dict[str, Any]) -> None:
    assert problems(**options) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_files": []}, "data.train_files is empty"),
        ({"train_files": ["none.parquet"]}, "train_files=none.parquet: there is no file /"),
        ({"val_files": ["a/none.jsonl"]}, "data.val_files=a/none.jsonl: there is no file /"),
        ({"train_files": ["gsm8k"]}, "is given as owner/name, owner/name:config or owner/name:config@split"),
        ({"train_files": [HERE]}, "a .parquet, .json or .jsonl file is expected"),
        (
            {"columns": {"promt": "question"}},
            "data.columns.promt=question: our columns are prompt, ground_truth",
        ),
        ({"columns": {"ability": "topic"}}, "nothing reads it; a reward sees it as one of data.columns.extra_info="),
        ({"columns": {"prompt": None}}, "data.columns.prompt=None: it cannot be left out"),
        ({"columns": {"prompt": 5}}, "data.columns.prompt=5: expected the name of a column"),
        ({"columns": {"prompt": []}}, "data.columns.prompt=[]: expected the name of a column"),
        ({"columns": {"prompt": "q"}, "prompt_key": "p"}, "data.prompt_key=p has no effect with data.columns.prompt=q"),
        ({"prompt_template": "Solve it"}, "data.prompt_template='Solve it': the prompt stands for {prompt}"),
        ({"ground_truth_regex": "("}, "data.ground_truth_regex='(': not a regular expression"),
        ({"ground_truth_regex": "#### .+"}, "no part of it is in parentheses"),
        ({"tools_path": "none.json"}, "data.tools_path=none.json: there is no file /"),
        ({"tools_path": HERE, "apply_chat_template_kwargs": {"tools": []}}, "both give tools"),
        ({"sources": {"a": 1}}, "data.sources.a=1: expected entries of weight and n"),
        ({"sources": {"a": {"wieght": 1}}}, "expected entries of weight and n"),
        ({"sources": {"a": {"weight": "much"}}}, "data.sources.a.weight='much': expected a number of at least 0"),
        ({"sources": {"a": {"weight": -0.1}}}, "data.sources.a.weight=-0.1: expected a number of at least 0"),
        ({"sources": {"a": {"weight": float("nan")}}}, "data.sources.a.weight=nan: expected a number"),
        ({"sources": {"a": {"weight": 1}, "b": {"n": 2}}}, "data.sources.b has no weight, and a has one"),
        ({"sources": {"a": {"weight": 0}}}, "data.sources: every weight is 0"),
        ({"sources": {"a": {"n": 1.5}}}, "data.sources.a.n=1.5: expected a whole number of at least 1"),
        ({"sampler__class_name": "Mine"}, "data.sampler.class_name=Mine has no effect without data.sampler.class_path"),
        ({"sampler__class_path": HERE}, "needs data.sampler.class_name, which is null"),
        (
            {"sampler__class_path": "none.py", "sampler__class_name": "A"},
            "data.sampler.class_path=none.py: there is",
        ),
        ({"custom_cls__path": HERE}, "needs data.custom_cls.name, which is null"),
        ({"custom_cls__name": "Mine"}, "data.custom_cls.name=Mine has no effect without data.custom_cls.path"),
        (
            {"sampler__class_path": HERE, "sampler__class_name": "A", "shuffle": False},
            "data.shuffle=false has no effect with data.sampler.class_path",
        ),
        (
            {"sampler__class_path": HERE, "sampler__class_name": "A", "sources": {"a": {"weight": 1}}},
            "data.sources.*.weight and data.sampler.class_path both decide",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(options: dict[str, Any], expected: str) -> None:
    (found,) = problems(**options)
    assert expected in found


def test_the_options_are_given_on_a_command_line_as_the_page_has_them() -> None:
    argv = [
        "data.columns={prompt: question, ground_truth: answer, n: null, extra_info: [level, topic]}",
        "data.sources={openai/gsm8k: {weight: 0.7}, math: {weight: 0.3, n: 4}}",
        "data.ground_truth_regex=#### (-?[0-9.,]+)",
        "data.prompt_template={prompt} Put the answer after ####.",
        "data.sampler.class_path=~/samplers.py",
    ]
    found = load_config(["model.path=m", *argv]).config.data
    assert found.columns == {
        "prompt": "question",
        "ground_truth": "answer",
        "n": None,
        "extra_info": ["level", "topic"],
    }
    assert found.sources == {"openai/gsm8k": {"weight": 0.7}, "math": {"weight": 0.3, "n": 4}}
    assert found.ground_truth_regex == "#### (-?[0-9.,]+)"
    assert found.prompt_template == "{prompt} Put the answer after ####."
    assert found.sampler.class_path == str(Path("~/samplers.py").expanduser())
