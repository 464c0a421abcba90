"""Recipes by name, path and module: what is found, what errors say, what other processes know of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from trainer.agentic.agent_trainer import AgentTrainer
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import built_in_recipes, load_recipe, prepare_recipe, recipe_overrides, trainer_of, worker_modules
from verl_lite.config import ConfigError, PPOConfig, load_config
from verl_lite.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_stays")

SETTINGS = "def overrides():\n    return {'actor.optim.lr': 0.25}\n"


def written(folder: Path, code: str = SETTINGS, file: str = "recipe.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(code)
    return folder


def config_of(name: str, *arguments: str) -> PPOConfig:
    return load_config([f"recipe={name}", *arguments], recipe_loader=recipe_overrides).config


def test_every_recipe_here_is_found_by_its_name_and_by_its_path() -> None:
    assert {"quickstart", "grpo", "ppo_gae"} <= set(built_in_recipes())
    for name in ("quickstart", "grpo"):
        module = load_recipe(name)
        assert module.__name__ == f"recipes.{name}.recipe"
        assert load_recipe(str(Path(module.__file__ or "").parent)) is module  # not a second copy of it


@pytest.mark.parametrize("name", ["HERE/my-recipe", "HERE/my-recipe/recipe.py", "./my-recipe", "~/my-recipe"])
def test_a_path_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = written(tmp_path / "my-recipe"), name.replace("HERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_of(name)
    assert config.actor.optim.lr == 0.25
    assert load_recipe(name).__name__ == "my-recipe.recipe"
    # the saved configuration finds it from any other folder, and the run is called after it
    assert config.recipe in (str(folder), str(folder / "recipe.py"))
    assert (config.trainer.experiment_name or "").startswith("my-recipe-")


def test_a_file_of_another_name_and_its_neighbours(tmp_path: Path) -> None:
    code = SETTINGS.replace("0.25", "LR")
    folder = written(tmp_path / "mine", f"from .numbers_of_it import LR\n{code}", "fast.py")
    written(folder, "LR = 0.125\n", "numbers_of_it.py")
    assert config_of(str(folder / "fast.py")).actor.optim.lr == 0.125
    assert load_recipe(str(folder / "fast.py")).__name__ == "mine.fast"


def test_a_module_and_a_package_with_a_recipe_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "laboratory" / "second")
    written(tmp_path / "laboratory", SETTINGS, "third.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, module in (("laboratory.second", "laboratory.second.recipe"), ("laboratory.third", "laboratory.third")):
        assert load_recipe(name).__name__ == module
        config = config_of(name)
        assert (config.recipe, config.actor.optim.lr) == (name, 0.25)
        assert (config.trainer.experiment_name or "").startswith(name.rpartition(".")[2] + "-")


def test_what_the_command_line_says_wins_and_prepare_sees_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "with_prepare", SETTINGS + "seen = []\ndef prepare(config):\n    seen.append(config)\n")
    config = config_of(str(folder), "actor.optim.lr=0.5")
    prepare_recipe(config)
    assert config.actor.optim.lr == 0.5
    assert load_recipe(str(folder)).seen == [config]
    prepare_recipe(config_of("null", "model.path=x"))  # no recipe: nothing to make


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"there is no .*/nowhere; a recipe is a path .* or a module"),
        ("./empty", r"there is no .*/empty/recipe\.py"),
        ("./notes.txt", r"there is no .*/notes\.txt"),
        ("nowhere.at_all", r"no such module.*recipes/ has .*quickstart"),
        ("./silent", r"silent/recipe\.py has no function overrides\(\)"),
        ("./listing", r"overrides\(\) returned list, expected a dictionary"),
        ("./v1.2", r"v1\.2 cannot be a package's name; rename it"),
        ("./json", r"would be imported as json\.recipe, but a module json already exists; rename the folder"),
        ("./wrong_key", r"actor\.optim\.lrr=0.25 \(recipe:.*did you mean actor\.optim\.lr"),
    ],
)
def test_what_is_wrong_is_said(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    codes = {"silent": "", "listing": "def overrides():\n    return [1]\n", "v1.2": SETTINGS, "json": SETTINGS}
    for folder, code in (codes | {"wrong_key": SETTINGS.replace("lr'", "lrr'")}).items():
        written(tmp_path / folder, code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        config_of(name)


@pytest.mark.parametrize(
    "code",
    [
        "import a_package_that_is_not_there\n" + SETTINGS,
        "def overrides():\n    return 1 / 0\n",
        "value = 1 / 0\n" + SETTINGS,
        SETTINGS + "def prepare(config):\n    1 / 0\n",
    ],
)
def test_an_error_in_the_recipes_own_code_is_shown_whole(code: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "broken", code)
    with pytest.raises((ZeroDivisionError, ModuleNotFoundError)) as caught:
        prepare_recipe(config_of(str(folder)))
    assert any("raised by the code of recipe=" in note and "broken" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].path == folder / "recipe.py"  # where it was raised, not where it was called


TRAINER = """
from trainer.ray_trainer import RayPPOTrainer

class Mine(RayPPOTrainer):
    def score(self, batch):
        return super().score(batch)

trainer_class = Mine
"""


def test_a_recipe_replaces_a_stage(tmp_path: Path) -> None:
    folder = written(tmp_path / "with_stage", SETTINGS + TRAINER)
    chosen = trainer_of(config_of(str(folder)))
    assert chosen.__name__ == "Mine" and chosen.fit is RayPPOTrainer.fit
    assert trainer_of(config_of("grpo")) is RayPPOTrainer
    assert trainer_of(config_of("agentic_sokoban")) is AgentTrainer


def test_a_trainer_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    acts = "import recipes.agentic_sokoban.recipe as sokoban\noverrides = sokoban.overrides\n"
    for name, code in (("no_class", SETTINGS + "trainer_class = 'Mine'\n"), ("no_agent", acts + TRAINER)):
        config = config_of(str(written(tmp_path / name, code)))
        with pytest.raises(UserError, match=r"its trainer_class is .*a subclass of trainer\.[\w.]+\.(Ray|Agent)"):
            trainer_of(config)


LOSS = """
from verl_lite.core_algos import register_policy_loss

@register_policy_loss("loss_of_a_recipe")
def loss(*columns, **counts):
    raise NotImplementedError
"""


def test_workers_import_the_recipe_and_what_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "with_loss", "from . import loss\n" + SETTINGS)
    written(folder, LOSS, "loss.py")
    config = config_of(str(folder), "actor.policy_loss.loss_mode=loss_of_a_recipe")
    assert worker_modules(config) == ["with_loss.recipe", "with_loss.loss"]
    config = config_of("null", "model.path=x")
    assert worker_modules(config) == []
    # registered by a module that no recipe knows
    written(tmp_path, LOSS.replace("of_a_recipe", "of_a_library"), "some_library.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("some_library")
    assert worker_modules(config_of("null", "model.path=x", "actor.policy_loss.loss_mode=loss_of_a_library")) == [
        "some_library"
    ]
