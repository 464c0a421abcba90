"""Random command lines and overlay files, drawn from the schema: values that fit, borders, wrong types, wrong keys, in
verl's spelling or ours, several at a time. Many fit, so that many cases reach the training step; what a key costs in
time is capped, since a long run is no defect.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.fuzz.cases import Case
from trainer.observe.tracking import TRACKERS
from verl_lite.config import Key, PPOConfig, schema_of
from verl_lite.config.sources import PREFIX
from verl_lite.config.spellings import ppo_keys
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

KEYS = list(schema_of(PPOConfig).keys.values())
VERL_KEYS = sorted(ppo_keys().entries)
PREFIXED = ("actor", "ref", "rollout", "model")
"""Sections that stand below `actor_rollout_ref` in verl."""

NAMES: dict[str, list[str]] = {
    **{key.name: list(key.expects) for key in KEYS if isinstance(key.expects, tuple)},
    "algorithm.adv_estimator": list(ADV_ESTIMATOR_REGISTRY),
    "algorithm.rollout_correction.rollout_is": ["token", "sequence", "segment", "geometric"],
    "algorithm.rollout_correction.rollout_is_threshold": ["2.0", "0.5_2.0", "2_1", "a_b"],
    "algorithm.rollout_correction.rollout_rs": ["token_k1", "seq_max_k2,token_ratio", "token_k9"],
    "algorithm.rollout_correction.rollout_rs_threshold": ["0.5_2.0", "3", "0.5_2,1_2", "x"],
    "actor.policy_loss.loss_mode": list(POLICY_LOSS_REGISTRY),
    "rollout.name": ["hf", "hf", "hf", "auto", "vllm", "sglang"],
    "trainer.logger": [*TRACKERS, "neptune"],
    "trainer.backend": ["inline", "inline", "inline", "ray"],
    "model.target_modules": ["all-linear", "q_proj", "no_such_proj"],
    "recipe": ["quickstart", "no_such_recipe"],
    "reward.custom_reward_function.name": ["compute_score", "no_such_function", "compute-score"],
    "reward.remote.url": ["http://127.0.0.1:9/score", "ftp://127.0.0.1/x", "http://[::1"],
    "ray_kwargs.ray_init.address": ["auto", "127.0.0.1:1", "ray://nowhere"],
}
PATHS = [
    "{root}/model", "{root}/reward_model", "{root}/train.jsonl", "{root}/reward.py", "{root}/tokenizer_strict",
    "{root}/tokenizer_bare", "{root}/tokenizer_silent", "{root}/no/such/place", "/dev/null", "/proc/nowhere/x",
    "~/nothing-here", "org/name", "pkg://json", "pkg://no.such", "{root}/train.jsonl/x", "ä ö/ü", "/",
]  # fmt: skip
TARGETS = ["no.such:thing", "math:sqrt", "os:environ", "verl_lite.core_algos:nothing", ":", "a:", ":b", "a:b:c"]
TEXTS = [
    "", " ", "none", "x" * 5000, "ä∑🙂", "a b", "a,b", "'", "${actor.optim.lr}", "${no.such}", "${", "\udcff", "a\nb",
    "${oc.env:NO_SUCH_VARIABLE}", "{x}", "--", "nan", "1", "true", "[", "{a: 1}", "!!python/object:os.system", "*a",
    "2024-01-01", "???", "a=b", "#x", "null",
]  # fmt: skip
NUMBERS = [
    "-1", "0", "1", "2", "7", "0.5", "1.0", "1e3", "-1e-6", "1e30", "nan", ".nan", "inf", "-inf", "1e400", "0x10",
    "1_000", "1000000000000", "9223372036854775808", "--1", "1,2", "one", "1/2", "12:30:45",
]  # fmt: skip
LISTS = [
    "[]", "[[]]", "[null]", "[1]", "a,b", "[a,[b,c]]", "[a", "{a: 1}", "[{a: 1}]", "[0.9,0.99]", "[0.9,1.0]",
    "[nan,nan]", "[true]", "0.9,0.95", "[0.9,0.95,0.99]", ",", "[,]",
]  # fmt: skip
MAPPINGS = ["{}", "{a: 1}", "{a: {b: 2}}", "[]", "5", "text", "{1: 2}", "{a: [1, {b: null}]}", "{'a.b': 1}", "{a: nan}"]
FREE = [
    "hidden_size=7", "num_hidden_layers=1", "vocab_size=100", "tokenize=true", "attention_dropout=2", "rope_theta=text",
    "max_position_embeddings=8", "nothing=1", "vllm.seed=1", "hf.use_cache=1", "sglang.x=1", "a.b.c=1", "scale=2",
    "torch_dtype=int8", "model_type=llama", "add_generation_prompt=false", "chat_template=text", "self=1",
]  # fmt: skip

PATH_ENDS = ("path", "files", "_dir")
POOLS = {
    "int": NUMBERS, "float": NUMBERS, "list": LISTS, "dict": MAPPINGS, "str": [*TEXTS, *PATHS, *TARGETS],
    "bool": ["true", "false", "2", "yes", "TRUE", "maybe", "null", "1.0", "[]", "''"],
}  # fmt: skip

CAPPED = {
    "rollout.n": 4, "rollout.val_kwargs.n": 4, "actor.ppo_epochs": 2, "critic.ppo_epochs": 2, "reward.num_workers": 2,
    "data.filter_overlong_prompts_workers": 2, "trainer.max_retries": 2, "reward.remote.max_retries": 1,
    "model.lora_rank": 64,
}  # fmt: skip
"""Keys of which a large number would only make a case long. Theirs are drawn from -1 to this."""

NOT_BELOW = {"reward.max_rpm": 100_000}
"""Keys of which a small number would."""

BUNDLES: list[list[str]] = [
    ["algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "trainer.total_training_steps=2"],
    ["algorithm.adv_estimator=gae", "critic.model.path={root}/model", "critic.ppo_epochs=2"],
    ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
    ["model.lora_rank=4", "actor.use_kl_loss=true"],
    ["rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1.0", "trainer.val_before_train=true"],
    ["reward_model.enable=true", "reward_model.model.path={root}/reward_model", "data.max_response_length=6"],
    ["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"],
    ["algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce"],
    ["actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2", "actor.shuffle=true"],
    ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.async_save=true"],
    ["reward.num_workers=1", "reward.max_rpm=100000"],
    ["data.max_prompt_length=23", "data.filter_overlong_prompts=true"],
    ["algorithm.norm_mean_type=batch", "algorithm.norm_std_type=running", "algorithm.adv_estimator=reinforce"],
]  # fmt: skip
"""Options that fit each other, to which others are added."""
ODD_ARGUMENTS = [
    "", "=", "=1", "a", "--verbose", "-x", "--config", "--config=no/such.yaml", "--config=.", "--config=/dev/null",
    "actor", "actor=1", "actor.optim={lr: 1}", "actor..optim.lr=1", ".actor=1", "actor[optim].lr=1e-4",
    "actor.optim.lr.x=1", "~", "~actor", "~no.such", "+", "+++a=1", "~~a", "~actor=1", "actor_rollout_ref=1",
    "hydra.run.dir=x", "defaults=[a]", "trainer@x=1", "a'b=1", "\udcff=1", "actor.optim.lr =1", "ACTOR.optim.lr=1",
]  # fmt: skip
MALFORMED_YAML = [
    "- a\n- b", "text", "\ta: 1", "a: [", "actor: &x {optim: *x}", "actor: null", "actor: 5", "trainer: text",
    "? [a, b]\n: 1", "1: 2", "null: 1", "actor.optim.lr: 1e-5\nactor: {optim: {lr: 2e-5}}", "x: \x00",
    "trainer: {seed: 1, seed: 2}", "trainer: {experiment_name: 2024-01-01}", "data: {train_files: {a: b}}",
    "!!python/object/apply:os.getcwd []", "trainer: {seed: !!binary aGVsbG8=}", "a.b: {c.d: 1}", "actor..optim: 1",
    "'': 1", "--- {}\n--- {}", "\udcff: 1", "trainer:\n  seed: 1\n bad: 2", "model: {override_config: {1: 2}}",
    "${a}: 1",
]  # fmt: skip


def draw_config(seed: int, index: int, root: Path) -> Case:
    """The case of that number. root: the folder of good files."""
    rng = random.Random(f"{seed} config {index}")
    texts = list(rng.choice(BUNDLES)) if rng.random() < 0.4 else []
    taste = rng.choice([0.2, 0.7, 1.0, 1.0])  # how often a value of this case is meant to fit
    texts += [draw_override(rng, fits=rng.random() < taste) for _ in range(rng.choice([1, 1, 1, 2, 3, 6]))]
    arguments, overlay, has_file = [], [], rng.random() < 0.25
    for text in (text.replace("{root}", str(root)) for text in texts):
        lines = in_file(rng, text) if has_file and rng.random() < 0.7 else None
        (arguments if lines is None else overlay).append(text if lines is None else lines)
    overlay += [rng.choice(MALFORMED_YAML)] if rng.random() < 0.04 else []
    arguments += [rng.choice(ODD_ARGUMENTS)] if rng.random() < 0.04 else []
    return Case(f"config-{index}", arguments, overlay)


def draw_override(rng: random.Random, fits: bool) -> str:
    """`key=value` with whatever operator and spelling."""
    if rng.random() < 0.1:  # a key of verl that has another name, no meaning, or no equal here
        name, value = rng.choice(VERL_KEYS), rng.choice(["null", "true", "false", "1", "0", *rng.sample(TEXTS, 3)])
    else:
        key = rng.choice(KEYS)
        name, value = key.name, draw_value(rng, key, fits)
        if key.kind == "dict" and rng.random() < 0.8:
            name, _, value = f"{name}.{rng.choice(FREE)}".partition("=")
    if not fits and rng.random() < 0.12:  # a slip of the finger
        place = rng.randrange(len(name))
        name = rng.choice([name[:place] + name[place + 1 :], name.upper(), name + ".x", name.split(".")[-1]])
    if name.split(".")[0] in PREFIXED and rng.random() < 0.3:
        name = f"{PREFIX}.{name}"
    operator = rng.choices(["", "+", "++", "~"], [0.85, 0.06, 0.06, 0.03])[0]
    return f"~{name}" if operator == "~" else f"{operator}{name}={value}"


def draw_value(rng: random.Random, key: Key, fits: bool) -> str:
    """A value that the key may well have, or a border, a wrong type, nonsense."""
    is_number = key.kind in ("int", "float")
    if fits and key.optional and rng.random() < 0.1:
        return "null"
    if fits and (names := NAMES.get(key.name) or (PATHS if key.path[-1].endswith(PATH_ENDS) else None)):
        return rng.choice(names)
    if fits and is_number:
        default = key.default if type(key.default) in (int, float) else 4
        value = str(rng.choice([default, default + 1, default // 2, 2 * default, 1, 2]))
    else:
        value = rng.choice(POOLS[key.kind] if rng.random() < 0.85 else TEXTS)
    cap = CAPPED.get(key.name)
    if is_number and (cap or key.name in NOT_BELOW):
        return value if value.startswith("-") else str(cap or NOT_BELOW[key.name])
    return value


def in_file(rng: random.Random, text: str) -> str | None:
    """An override as lines of YAML; None where YAML cannot say it."""
    name, equals, value = text.lstrip("+~").partition("=")
    if not equals or text.startswith("~"):
        return None
    typed = value if rng.random() < 0.7 else json.dumps(value)
    if rng.random() < 0.5:
        return f"{name}: {typed}"
    return "\n".join("  " * depth + f"{key}:" for depth, key in enumerate(name.split("."))) + f" {typed}"
