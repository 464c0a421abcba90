"""Every option that names code of the user answers a wrong path with key, value, reason and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import WRONG_INPUT
from trainer.main_ppo import main
from trainer.observe.trackers import check_trackers
from verl_lite.config.user_calls import ENGINE_CALL, ESTIMATOR_CALL, FILTER_CALL, LOSS_CALL, registered_problems
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.envs import env_templates
from verl_lite.errors import UserError
from verl_lite.registry import load_object
from verl_lite.rewards.scoring import load_scorer
from workers.agents.program_host import load_function

MODULES = {
    "users_code": (
        "value = 3\n"
        "def estimator(token_level_rewards, response_mask, index, **others): ...\n"
        "def needs_weights(token_level_rewards, response_mask, weights): ...\n"
        "def two(first, second): ...\n"
    ),
    "users_syntax": "import os\ndef broken(:\n",
    "users_failure": "def divide():\n    return 1 / 0\n\nresult = divide()\n",
    "users_import": "import a_package_that_is_not_there\n",
    "users_exit": "raise SystemExit(3)\n",
}
PATH_PROBLEMS = {
    "users_cod:f": "there is no module users_cod",
    "no_package.module:f": "there is no module no_package",
    "users_code:estimatr": "users_code has no estimatr; did you mean estimator; it defines: estimator, needs_weights",
    "users_code:value": "users_code:value is the int 3, not a function or class",
    "users_code.py:estimator": "users_code.py is a file: write its module, users_code:estimator",
    "users_code:": "the module in front of the colon, or the name behind it, is missing",
    ":estimator": "the module in front of the colon, or the name behind it, is missing",
    "users_syntax:f": "users_syntax.py, line 2, is not Python (invalid syntax): `def broken(:`",
    "users_import:f": "importing users_import raises ModuleNotFoundError: No module named 'a_package_that",
    "users_exit:f": "importing users_exit raises SystemExit: 3",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("path", "reason"), PATH_PROBLEMS.items())
def test_a_path_without_a_callable_is_refused_with_its_reason(path: str, reason: str) -> None:
    for key, kind, call in (
        ("algorithm.adv_estimator", "function", ESTIMATOR_CALL),
        ("actor.policy_loss.loss_mode", "function", LOSS_CALL),
        ("rollout.name", "Class", ENGINE_CALL),
        ("agentic.train_env_manager.group_filter_cls", "Class", FILTER_CALL),
    ):
        [problem] = registered_problems(key, path, {}, kind, call)
        assert problem.startswith(f"{key}={path}: ") and reason in problem
        assert problem.endswith(f"Set {key} to pkg.module:{kind}, or to a registered name")
    with pytest.raises(UserError) as tracker:
        check_trackers([path])
    assert str(tracker.value).startswith(f"trainer.logger={path}: ") and reason in str(tracker.value)
    with pytest.raises(UserError) as program:
        load_function(path, {})
    assert str(program.value).startswith(f"agentic.program={path}: ") and reason in str(program.value)
    with pytest.raises(UserError) as env:
        env_templates({"mine": {"env_type": path}})
    assert str(env.value).startswith("agentic.custom_envs.mine.env_type") and reason in str(env.value)


def test_an_exception_at_import_shows_the_users_lines(folder: Path) -> None:
    [problem] = registered_problems("key", "users_failure:f", {}, "function", LOSS_CALL)
    file = folder / "users_failure.py"
    assert (
        "importing users_failure raises ZeroDivisionError: division by zero "
        f"(raised in {file}, line 2: `return 1 / 0`, called in {file}, line 4: `result = divide()`)"
    ) in problem


@pytest.mark.parametrize(
    ("path", "call", "reason"),
    [
        (
            "users_code:two",
            LOSS_CALL,
            "two(first, second) cannot be called as needed: missing a required argument: 'second'",
        ),
        ("users_code:two", LOSS_CALL, "Expected f(inputs: LossInputs) -> (loss, metrics), or with verl's arguments"),
        ("users_code:needs_weights", ESTIMATOR_CALL, "missing a required argument: 'weights'"),
        ("users_code:two", FILTER_CALL, "Expected Class(config, env_manager_config, mode)"),
        ("users_code:two", ENGINE_CALL, "Expected Class(model_path, config, *, max_model_len"),
        ("builtins:max", ESTIMATOR_CALL, "has no signature that Python can read"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(path: str, call: object, reason: str) -> None:
    [problem] = registered_problems("key", path, {}, "function", call)
    assert reason in problem


def test_signatures_that_fit_are_accepted() -> None:
    assert not [*registered_problems("key", "users_code:estimator", {}, "function", ESTIMATOR_CALL)]
    for registry, call in ((ADV_ESTIMATOR_REGISTRY, ESTIMATOR_CALL), (POLICY_LOSS_REGISTRY, LOSS_CALL)):
        for function in registry.values():
            path = f"{function.__module__}:{function.__qualname__}"
            assert not [*registered_problems("key", path, {}, "function", call)]


@pytest.mark.parametrize("name", ["users_syntax", "users_failure", "users_import", "users_exit"])
def test_files_and_modules_of_rewards_and_data_are_answered_alike(name: str, folder: Path) -> None:
    for place in (str(folder / f"{name}.py"), f"pkg://{name}"):
        with pytest.raises(UserError) as caught:
            load_object(place, "f", "data.custom_cls.path", "data.custom_cls.name")
        assert str(caught.value).startswith(f"data.custom_cls.path={place!r}: ")
        assert "is not Python" in str(caught.value) or "raises" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("value", "defines the int 3 of that name"),
        ("estimatr", "did you mean estimator"),
        ("two", r"two\(first, second\) cannot be called as needed.*Expected f\(data_source, solution_str"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_with_its_key(name: str, reason: str, folder: Path) -> None:
    from verl_lite.config import RewardConfig

    config = RewardConfig()
    config.custom_reward_function.path = str(folder / "users_code.py")
    config.custom_reward_function.name = name
    with pytest.raises(UserError, match=f"reward.custom_reward_function.name='{name}': .*{reason}"):
        load_scorer(config)


@pytest.mark.parametrize(
    "option", ["algorithm.adv_estimator=minee:median", "actor.policy_loss.loss_mode=users_code:nothing"]
)
def test_a_wrong_path_ends_the_command_like_any_wrong_option(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.path=/nowhere", "data.train_files=/nowhere", f"trainer.default_local_dir={folder / 'run'}"]
    assert main([*words, option, "trainer.device=cpu"]) == WRONG_INPUT
    message = capsys.readouterr().err
    assert f"  - {option}: " in message and "Traceback" not in message
