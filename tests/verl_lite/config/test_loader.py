"""The command line as users type it: grammar, types, layers, provenance, and messages that name the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_lite.config import (
    KEYS,
    ConfigError,
    LoadedConfig,
    PPOConfig,
    fields,
    help_config,
    load_config,
    load_schema,
    parse_value,
    print_config,
    save_config,
    split_choices,
    value_of,
    written_value,
)
from verl_lite.config.option_table import convert


def load(*arguments: str) -> LoadedConfig[PPOConfig]:
    return load_config(["model.path=m", *arguments])


def problems(*arguments: str, **kwargs: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", *arguments], **kwargs)
    return caught.value.problems


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("actor.optim.lr=1e-6", 1e-6),
        ("actor.optim.lr='2e-5'", 2e-5),
        ("actor.optim.betas=[0.8,1e-1]", [0.8, 0.1]),
        ("data.train_batch_size=1e3", 1000),
        ("data.train_batch_size=1_024", 1024),
        ("data.train_batch_size=010", 10),
        ("data.train_batch_size=08", 8),
        ("data.seed=null", None),
        ("data.shuffle=False", False),
        ("trainer.project_name=0012", "0012"),
        ("trainer.project_name=1e-6", "1e-6"),
        ("trainer.project_name=12:30", "12:30"),
        ("trainer.project_name=a: b", "a: b"),
        ("trainer.project_name=", ""),
        ("data.train_files=a.parquet", ["a.parquet"]),
        ("data.train_files=a.parquet,b.parquet", ["a.parquet", "b.parquet"]),
        ('data.train_files=[["a.parquet"],["b.parquet"]]', ["a.parquet", "b.parquet"]),
        ("trainer.logger=console", ["console"]),
        ("rollout.engine_kwargs.vllm.a=[1,{b: [c, 2.5]}]", {"vllm": {"a": [1, {"b": ["c", 2.5]}]}}),
        ("+model.override_config.text_config.rope=1e4", {"text_config": {"rope": 1e4}}),
        ("data.apply_chat_template_kwargs={a.b: True}", {"a.b": True}),
        ("model.override_config={a: {b: 1}, c: null}", {"a": {"b": 1}, "c": None}),
        ("data.apply_chat_template_kwargs={enable_thinking:false}", {"enable_thinking": False}),
        ("reward.reward_kwargs={a:1,b:{c:[x,{d:2}]}}", {"a": 1, "b": {"c": ["x", {"d": 2}]}}),
        ("reward.reward_kwargs={url:http://x:80/v1,'k':v}", {"url": "http://x:80/v1", "k": "v"}),
        ("reward.reward_kwargs={a: '{x:1}', b: don't}", {"a": "{x:1}", "b": "don't"}),
        ("reward.reward_kwargs={a: 'it''s {x:1}', b:2}", {"a": "it's {x:1}", "b": 2}),
        ('reward.reward_kwargs={"a": "\\"{x:{y:1}}"}', {"a": '"{x:{y:1}}'}),
        ('data.prompt_template="{\\"a\\":{\\"b\\":1}} {prompt}"', '{"a":{"b":1}} {prompt}'),
        ("reward.reward_kwargs.ratio=16:9", {"ratio": "16:9"}),
        ("reward.reward_kwargs.code=010", {"code": "010"}),
        ("data.prompt_template='None'", "None"),
        *((f"data.prompt_template={text}", text) for text in ("#### (.+)", "{prompt}", "[a", "Do {prompt} after ####")),
        ("data.prompt_template='#### x'", "#### x"),
        ('data.prompt_template="a\\nb"', "a\nb"),
        ("data.prompt_template=null", None),
        ("data.prompt_template=~", None),
    ],
)
def test_a_value_has_the_type_of_its_key(argument: str, expected: object) -> None:
    name = next(key for key in KEYS if argument.lstrip("+").startswith(key))
    value = value_of(load(argument).config, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "value",
    [
        *("😀 é", "a\u2028b\x85c\x7f\ufeff", '{"a":{"b":1}}', "\\ud83d", "it's #1: {a:1}", "010", " a, b "),
        *({"😀": ['{"a":{"b":1}}', None, True]}, [1e-6, 2, "a,b"]),
    ],
)
def test_a_written_value_is_read_as_it_was(value: object) -> None:
    assert parse_value(written_value(value)) == value


@pytest.mark.parametrize(
    ("argument", "fragments"),
    [
        ("actor.optim.lr=fast", ["actor.optim.lr=fast", "command line", "a number", "actor.optim.lr=1e-06"]),
        ("actor.optim.lr=.nan", ["actor.optim.lr=.nan", "a number"]),
        ("actor.optim.lr=true", ["actor.optim.lr=true", "a number"]),
        ("data.train_batch_size=1.5", ["data.train_batch_size=1.5", "a whole number", "data.train_batch_size=1024"]),
        ("data.train_batch_size=1:30", ["data.train_batch_size=1:30", "a whole number"]),
        ("reward.reward_kwargs={a: 16:9}", ["reward.reward_kwargs={a: 16:9}", "16:9 as 969", "as '16:9'"]),
        ("reward.reward_kwargs.a=[010]", ["reward.reward_kwargs.a=[010]", "010 as 8"]),
        ("model.tokenizer_path=None", ["model.tokenizer_path=None (command line): write null"]),
        ("data.val_files=None", ["data.val_files=None (command line): write null"]),
        ("actor.clip_ratio_c=None", ["actor.clip_ratio_c=None (command line): write null"]),
        ("data.shuffle=2", ["data.shuffle=2", "true or false", "data.shuffle=true"]),
        ("actor.optim.betas=[a,b]", ["actor.optim.betas=[a,b]", "a list of numbers", "actor.optim.betas=[0.9,0.999]"]),
        ("actor.optim=3", ["actor.optim is a group of options", "actor.optim.lr"]),
        ("rollout.engine_kwargs=3", ["rollout.engine_kwargs=3", "a mapping"]),
        ("data.train_batch_size=8,16", ["data.train_batch_size=8,16", "a whole number"]),
        ("--gpus", ["--gpus is not known", "--config FILE"]),
        ("--config-name=ppo", ["--config-name=ppo is not known", "--config FILE"]),
        ("data.shuffle", ["'data.shuffle' is not key=value"]),
        (" ", ["without blanks"]),
        ("trainer.project_name=\udcff", ["trainer.project_name=\\udcff", "UTF-8"]),
        ("~actor.optim.lrr", ["actor.optim.lrr", "did you mean actor.optim.lr"]),
        ("trainer.project_name=${oc.env:NO_SUCH_VARIABLE}", ["trainer.project_name", "NO_SUCH_VARIABLE"]),
        ("data.seed=${trainer.project_name}", ["data.seed=${trainer.project_name}", "verl_lite"]),
        ("agentic.program_kwargs=${trainer.seed}", ["agentic.program_kwargs=${trainer.seed}", "int"]),
        ("agentic.program_kwargs=${reward.nothing}", ["agentic.program_kwargs=${reward.nothing}", "not found"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(argument: str, fragments: list[str]) -> None:
    text = "\n".join(problems(argument))
    for fragment in fragments:
        assert fragment in text


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError, match="has 4 problems") as caught:
        load("lr=1e-6", "data.train_batch_size=x", "--nope", "rollout.multi_turn.enable=True")
    assert len(caught.value.problems) == 4


# --- unknown keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("lr=1e-6", "=1e-6 (command line): there is no such key; did you mean actor.optim.lr"),
        ("actor.lr=1e-6", "=1e-6 (command line): there is no such key; did you mean actor.optim.lr"),
        ("+trainer.xyzzy=1", "=1 (command line): there is no such key; --help-config"),
        ("data.train_file=a", "=a (command line): there is no such key; did you mean data.train_files"),
        ("actor_rollout_ref.rolout.n=4", "=4 (command line): there is no such key; did you mean rollout.n"),
        ("clip_ratio=0.2", "=0.2 (command line): there is no such key; did you mean actor.clip_ratio"),
        *((f"{key}=1", "not a key: parts separated by single dots") for key in ("a.", ".a", "a..b", 'a."b"', "a[b]")),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_one(argument: str, said: str) -> None:
    (problem,) = problems(argument)
    assert said in problem


def test_choices_are_cut_at_commas_outside_quotes_and_brackets() -> None:
    assert split_choices("1e-6, 1e-5") == ["1e-6", "1e-5"]
    assert split_choices("[a,b],[c]") == ["[a,b]", "[c]"]
    assert split_choices("'a,b',c") == ["'a,b'", "c"]
    assert split_choices("${oc.select:a,b}") == ["${oc.select:a,b}"]


# --- operators ---------------------------------------------------------------------------------------------------


def test_tilde_resets_a_key_a_group_or_deletes_an_entry() -> None:
    loaded = load(
        *("actor.optim.lr=1", "data.seed=3", "data.seed=4", "+rollout.engine_kwargs.vllm.a=1"),
        *("+rollout.engine_kwargs.vllm.b=2", "~actor.optim", "~data.seed", "~rollout.engine_kwargs.vllm.a"),
    )
    assert loaded.config.actor.optim.lr == 1e-6
    assert loaded.config.data.seed is None
    assert loaded.config.rollout.engine_kwargs == {"vllm": {"b": 2}}
    assert loaded.provenance["actor.optim.lr"] == "default"
    assert "rollout.engine_kwargs.vllm.a" not in loaded.provenance


def test_the_prefix_of_verl_is_stripped_everywhere() -> None:
    loaded = load(
        "actor_rollout_ref.actor.optim.lr=3e-6",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.x=1",
        "actor_rollout_ref.actor.clip_ratio_low=${actor_rollout_ref.actor.clip_ratio}",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="
        "${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,1}",
    )
    assert loaded.config.actor.optim.lr == 3e-6
    assert loaded.config.rollout.engine_kwargs == {"vllm": {"x": 1}}
    assert loaded.config.actor.clip_ratio_low == 0.2
    assert loaded.config.ref.log_prob_max_token_len_per_gpu == 16384
    assert loaded.provenance["actor.optim.lr"] == "command line"


def test_references_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    loaded = load(
        "data.train_files=${oc.env:WHERE}/a.parquet",
        "trainer.project_name=p",
        "trainer.experiment_name=${trainer.project_name}-7",
        "data.max_response_length=${data.max_prompt_length}",
    )
    assert loaded.config.data.train_files == ["/data/a.parquet"]
    assert loaded.config.trainer.default_local_dir == "runs/p/p-7"
    assert loaded.config.data.max_response_length == 512
    assert loaded.omega.data.max_response_length == 512


@pytest.mark.parametrize("prefix", ["", "actor_rollout_ref."])
def test_a_reference_in_a_file_finds_a_key_of_verl_below_its_prefix(prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    sections = "{model: {path: m}, actor: {grad_clip: 0.5}}"
    critic = f"{{grad_clip: '${{{prefix}actor.grad_clip}}'}}"
    file.write_text(f"actor_rollout_ref: {sections}\ncritic: {critic}\nalgorithm: {{adv_estimator: gae}}\n")
    assert load_config([f"--config={file}"]).config.critic.optim.clip_grad == 0.5


def test_a_reference_can_stand_for_a_whole_dictionary() -> None:
    reference = "agentic.program_kwargs=${reward.reward_kwargs}"
    loaded = load("agentic.program_kwargs.b=1", "reward.reward_kwargs={a: true}", reference)
    assert loaded.config.agentic.program_kwargs == {"a": True}
    assert loaded.provenance["agentic.program_kwargs"] == "command line"
    assert load(reference, "agentic.program_kwargs.b=1").config.agentic.program_kwargs == {"b": 1}


def test_a_leading_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    loaded = load_config(["model.path=~/m", "data.train_files=[~/a.parquet]", "trainer.project_name=~/x"])
    assert loaded.config.model.path == "/home/me/m"
    assert loaded.config.data.train_files == ["/home/me/a.parquet"]
    assert loaded.config.trainer.project_name == "~/x"


# --- layers ------------------------------------------------------------------------------------------------------


def recipe(name: str) -> dict[str, object]:
    assert name == "quickstart"
    return {"actor.optim.lr": 1e-4, "trainer": {"total_epochs": 7, "seed": 5}, "rollout.engine_kwargs.hf.a": 1}


def test_defaults_recipe_files_command_line_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {seed: 6, total_epochs: 8}\nactor_rollout_ref:\n  rollout: {n: 3}\n")
    (tmp_path / "b.yaml").write_text("trainer.seed: 9\nrollout:\n  engine_kwargs: {vllm: {b.c: 2}}\n")
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    loaded = load_config(
        ["--config", files[0], f"--config={files[1]}", "trainer.total_epochs=10"],
        recipe_loader=recipe,
    )
    config = loaded.config
    assert (config.recipe, config.actor.optim.lr, config.rollout.n) == ("quickstart", 1e-4, 3)
    assert (config.trainer.seed, config.trainer.total_epochs) == (9, 10)
    assert config.rollout.engine_kwargs == {"hf": {"a": 1}, "vllm": {"b.c": 2}}
    assert loaded.provenance["actor.optim.lr"] == "recipe:quickstart"
    assert loaded.provenance["rollout.n"] == f"file:{files[0]}"
    assert loaded.provenance["trainer.seed"] == f"file:{files[1]}"
    assert loaded.provenance["trainer.total_epochs"] == "command line"
    assert loaded.provenance["rollout.engine_kwargs.hf.a"] == "recipe:quickstart"
    assert loaded.provenance["rollout.engine_kwargs.vllm.b.c"] == f"file:{files[1]}"
    assert loaded.provenance["data.seed"] == "default"
    assert set(KEYS) - set(loaded.provenance) == {"rollout.engine_kwargs"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "quickstart"),
        (["actor_rollout_ref.model.path=m"], None),
        (["data.train_files=a"], None),
        (["recipe=null"], None),
        (["model.path=m", "recipe=quickstart"], "quickstart"),
    ],
)
def test_the_quickstart_is_chosen_where_neither_model_nor_data_is_given(
    arguments: list[str], expected: str | None
) -> None:
    loaded = load_config(arguments, recipe_loader=recipe)
    assert loaded.config.recipe == expected
    assert loaded.config.trainer.total_epochs == (7 if expected else 1)


def test_a_recipe_is_held_to_the_same_rules() -> None:
    with pytest.raises(ConfigError, match=r"actor\.optim\.lrr=1 \(recipe:quickstart\).*did you mean actor\.optim\.lr"):
        load_config([], recipe_loader=lambda name: {"actor": {"optim": {"lrr": 1}}})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "loop.yaml").write_text("base: other.yaml\n")
    (tmp_path / "hydra.yaml").write_text("defaults: [ppo_trainer]\n")
    (tmp_path / "unknown.yaml").write_text("trainer: {sed: 1, project_name: true}\nactor: null\nactor_rollout_ref: 5\n")
    (tmp_path / "octal.yaml").write_text("trainer:\n  seed: 010\n  project_name: '0012'\ndata: {chat_template: None}\n")
    names = ["missing.yaml", "broken.yaml", "list.yaml", "loop.yaml", "hydra.yaml", "unknown.yaml", "octal.yaml"]
    text = "\n".join(problems(*(f"--config={tmp_path / name}" for name in names)))
    assert f"there is no file {tmp_path / 'missing.yaml'}" in text
    assert f"{tmp_path / 'broken.yaml'} cannot be read" in text
    assert f"{tmp_path / 'list.yaml'} cannot be read: it is a list" in text
    assert "give --config once for each file" in text
    assert "defaults=['ppo_trainer']" in text
    assert f"trainer.sed=1 (file:{tmp_path / 'unknown.yaml'}): there is no such key; did you mean" in text
    assert "trainer.project_name=True" in text
    assert "actor is a group of options" in text
    assert "actor_rollout_ref=5" in text
    assert f"{tmp_path / 'octal.yaml'}: line 2: YAML reads 010 as 8" in text and "0012" not in text
    assert f"data.chat_template=None (file:{tmp_path / 'octal.yaml'}): write null for no value" in text


def test_switches_are_reported_as_action() -> None:
    assert load().action == "run"
    assert load("--print-config").action == "print"
    loaded = load_config(["--help-config", "actor.optim"])
    assert (loaded.action, loaded.help_prefix) == ("help", "actor.optim")
    assert load_config(["--help"]).help_prefix is None


# --- what follows from what was given ----------------------------------------------------------------------------


def test_a_micro_batch_size_asks_for_fixed_micro_batches() -> None:
    loaded = load("actor.ppo_micro_batch_size_per_gpu=4", "rollout.log_prob_micro_batch_size_per_gpu=8")
    assert loaded.config.actor.use_dynamic_bsz is False
    assert loaded.config.rollout.log_prob_use_dynamic_bsz is False
    assert loaded.config.ref.log_prob_use_dynamic_bsz is None
    assert loaded.provenance["actor.use_dynamic_bsz"] == "implied by actor.ppo_micro_batch_size_per_gpu"
    assert any("actor.use_dynamic_bsz=false" in note for note in loaded.notes)
    said = load("actor.ppo_micro_batch_size_per_gpu=4", "actor.use_dynamic_bsz=true")
    assert said.config.actor.use_dynamic_bsz is True


def test_a_nameless_run_gets_a_new_name_and_cannot_resume() -> None:
    first, second = load(), load()
    assert first.config.trainer.experiment_name != second.config.trainer.experiment_name
    assert first.config.trainer.default_local_dir.endswith(f"verl_lite/{first.config.trainer.experiment_name}")
    assert "trainer.experiment_name" in problems("trainer.resume_mode=auto")[0]
    assert load("trainer.resume_mode=auto", "trainer.experiment_name=a").config.trainer.resume_mode == "auto"


# --- the schema --------------------------------------------------------------------------------------------------


def test_every_field_says_what_it_is_for_and_its_default_fits_its_type() -> None:
    for key in KEYS.values():
        assert key.doc, key.name
        assert convert(key, key.default) == key.default, key.name


@dataclass
class Inner(fields.Options):
    rate: float = fields.opt(0.5, "a number")


@dataclass
class Other(fields.Options):
    """Options of some other command."""

    inner: Inner = fields.section(Inner, "a group")
    files: list[str] = fields.opt([], "files")


def test_any_dataclass_of_options_can_be_loaded() -> None:
    loaded = load_schema(["inner.rate=1e-3", "files=a"], Other)
    assert loaded.config == Other(Inner(1e-3), ["a"])
    assert "rate: 0.001" in print_config(loaded) and "inner.rate = 0.5" in help_config(Other)
    with pytest.raises(ConfigError, match=r"actor\.grad_clip=1 .*no such key"):
        load_schema(["actor.grad_clip=1"], Other)
    with pytest.raises(ConfigError, match=r"did you mean inner\.rate"):
        load_schema(["inner.rat=1"], Other)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("/data/run #2", "/data/run #2"),
        ("/data/# 1", "/data/# 1"),
        ("#1", "#1"),
        ("a\t#b", "a\t#b"),
        ("'/data/run #2'", "/data/run #2"),
        ("[/a #1/x.jsonl, /b/y#.jsonl]", ["/a #1/x.jsonl", "/b/y#.jsonl"]),
        ("{a: b #c, d #e: 2}", {"a": "b #c", "d #e": 2}),
        ("1e-6", 1e-6),
        ("a#b", "a#b"),
    ],
)
def test_a_value_of_the_command_line_has_no_comments(raw: str, expected: object) -> None:
    assert parse_value(raw) == expected


def test_a_path_with_a_number_sign_survives_the_files_of_a_run(tmp_path: Path) -> None:
    loaded = load_config([f"model.path={tmp_path}/model #2", "data.train_files=[a #1.jsonl,b.jsonl]"])
    assert loaded.config.model.path == f"{tmp_path}/model #2"
    assert loaded.config.data.train_files == ["a #1.jsonl", "b.jsonl"]
    again = load_config([f"--config={save_config(loaded, tmp_path / 'config.yaml')}"])
    assert again.config.model.path == f"{tmp_path}/model #2"
    assert again.config.data.train_files == ["a #1.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("data.train_files=/data/run #2.jsonl", "data.train_files", ["/data/run #2.jsonl"]),
        ("data.train_files=/a #1.jsonl,/b #2.jsonl", "data.train_files", ["/a #1.jsonl", "/b #2.jsonl"]),
        ("data.train_files=[/a #1.jsonl,/b.jsonl]", "data.train_files", ["/a #1.jsonl", "/b.jsonl"]),
        ("data.train_files='/a #1.jsonl'", "data.train_files", ["/a #1.jsonl"]),
        ("model.path=/models/my #1", "model.path", "/models/my #1"),
        ("reward.reward_kwargs.path=/data/a #b", "reward.reward_kwargs", {"path": "/data/a #b"}),
    ],
)
def test_a_blank_and_a_hash_in_a_text_begin_no_comment(word: str, key: str, expected: object) -> None:
    assert value_of(load_config(["model.path=m", word]).config, key) == expected
