"""Teachers in whole runs: separate models, the policy with another prompt, a server; and wrong input."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import write_rows
from tests.trainer import tiny_run
from trainer.data.prompts import PromptDataset
from trainer.ppo.teacher_server import TeacherFailure, server_of
from trainer.ppo.teachers import PrivilegedPrompts, rows_of
from verl_lite.config import ConfigError, PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.config.distillation import Teacher
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column
from workers.roles.frozen_models import teacher_network

LOSS = "distillation.distillation_loss"
STEPS = ["trainer.total_training_steps=2", "trainer.val_before_train=false"]
Reply = Callable[[dict[str, Any]], tuple[int, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_run.write_files(tmp_path_factory.mktemp("run"), [f"{number}+{number}" for number in range(8)])
    rows = [json.loads(line) for line in (path / "prompts.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["data_source"] = ("talk", "sums")[number % 2]
    write_rows(path / "prompts.jsonl", rows)
    tiny_qwen2(path / "teacher", vocab=70, seed=3)
    return path


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., str]]:
    """Starts a server with a reply function; returns its url. By default it has the teacher's log-probs."""
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")

    def correct(body: dict[str, Any]) -> tuple[int, Any]:
        ids = body["prompt"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :, :64]  # the policy's tokens
        log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        tokens = [*(tokenizer.decode([each]) for each in ids), "x"]
        return 200, {"choices": [{"logprobs": {"token_logprobs": [None, *log_probs, -1.0], "tokens": tokens}}]}

    servers = []

    def start(reply: Reply = correct) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status, content = reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    start.correct = correct  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.shutdown()


def first_loss(folder: Path, name: str, *options: str) -> float:
    return tiny_run.run(folder, name, *STEPS, *options)[0]["actor/distillation_loss"]


@pytest.mark.slow
def test_a_server_and_a_model_give_the_same_run(folder: Path, serve: Callable[..., str]) -> None:
    """The teacher's six additional tokens have no probability in the model, nor on the server."""
    path = tiny_run.run(folder, "path", *STEPS, f"distillation.teachers.big.path={folder}/teacher")
    server = f"distillation.teachers.big={{url: '{serve()}', model: big}}"
    url = tiny_run.run(folder, "url", *STEPS, server)
    for one, other in zip(path, url, strict=True):
        assert one["actor/distillation_loss"] == pytest.approx(other["actor/distillation_loss"], abs=1e-5) != 0
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
        assert one["distillation/taught_frac"] == other["distillation/taught_frac"] == 1


@pytest.mark.slow
def test_teachers_by_data_source(folder: Path) -> None:
    """A model for one source and the policy with a hint for the other; one source without a teacher; no reward."""
    teachers = [
        f"distillation.teachers={{talk: {{path: {folder}/teacher}}, "
        "me: {key: sums, prompt_template: '{prompt} is {ground_truth}'}}",
        f"{LOSS}.loss_mode=jsd_topk",
        f"{LOSS}.topk=4",
    ]
    for logged in tiny_run.run(folder, "two", *STEPS, *teachers):
        assert logged["distillation/taught_frac"] == 1 and logged["actor/distillation_loss"] > 0
        assert 0 < logged["distillation/student_mass"] < 1
        assert logged["actor/loss"] == pytest.approx(logged["actor/pg_loss"] + logged["actor/distillation_loss"])
    half = [f"distillation.teachers.a={{path: {folder}/teacher, key: talk}}"]
    assert 0 < tiny_run.run(folder, "half", *STEPS, *half)[0]["distillation/taught_frac"] < 1
    alone = [*teachers, f"{LOSS}.use_task_rewards=false", "reward.function_weight=0", "rollout.n=1"]
    for logged in tiny_run.run(folder, "alone", *STEPS, *alone):
        assert (
            logged["actor/loss"] == pytest.approx(logged["actor/distillation_loss"]) and logged["actor/grad_norm"] > 0
        )
    with pytest.raises(UserError, match=r"no teacher has key=sums.*use_task_rewards=true"):
        tiny_run.run(folder, "none", *STEPS, *half, f"{LOSS}.use_task_rewards=false")


@pytest.mark.slow
def test_the_students_own_top_tokens(folder: Path) -> None:
    """A policy that is its own teacher, with the same prompt, has a divergence of 0 at first; the pass is needed."""
    more = [f"{LOSS}.loss_mode=reverse_kl_topk", f"{LOSS}.topk=3", f"{LOSS}.topk_source=student"]
    same = ["distillation.teachers.me.prompt_template='{prompt}'", *more]
    assert first_loss(folder, "same", *same) == pytest.approx(0, abs=1e-5)
    assert first_loss(folder, "other", f"distillation.teachers.t.path={folder}/teacher", *more) > 0.1


def test_a_failing_server_is_counted_and_then_ends_the_run(
    folder: Path, serve: Callable[..., Any], tmp_path: Path
) -> None:
    """The first call is made inside of an event loop, as in a cell of a notebook."""
    numbers = iter(range(100))

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {}) if next(numbers) < 1 else serve.correct(body)

    config, shown = PPOConfig(), list[str]()
    config.distillation.teachers = {"t": {"url": serve(reply), "model": "big"}}
    [teacher] = config.distillation.named_teachers()
    ids = torch.tensor([[0, 5, 6, 7, 8], [4, 5, 6, 7, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    columns = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 2:]}
    batch = DataProto.from_dict(columns)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    server = server_of(teacher, config, tokenizer, tmp_path, shown.append)

    async def in_a_cell() -> DataProto:
        return server.compute_teacher_log_prob(batch)

    found = asyncio.run(in_a_cell()).batch
    assert sorted(found["has_teacher"].tolist()) == [False, True] and len(shown) == 1 and "status 400" in shown[0]
    row = found["has_teacher"].nonzero().item()
    assert (found["teacher_log_probs"][row] != 0).tolist() == [[True, True, True], [True, True, False]][row]
    with pytest.raises(TeacherFailure, match=r"reward.max_error_rate=0.1"):
        numbers = iter([0] * 99)
        larger_batch = DataProto.concat([batch] * 12)
        server_of(teacher, config, tokenizer, tmp_path, shown.append).compute_teacher_log_prob(larger_batch)


def found_in(reply: Any, name: str) -> list[Any]:
    return reply["choices"][0]["logprobs"][name]


def with_log_prob(reply: Any, value: Any) -> Any:
    found_in(reply, "token_logprobs")[3] = value
    return reply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda status, reply: (404, {"detail": "no such model"}), "status 404"),
        (lambda status, reply: (200, {"choices": [{"text": "x", "logprobs": None}]}), "no log-probs of the prompt"),
        (lambda status, reply: (200, [1]), "no log-probs of the prompt"),
        (lambda status, reply: found_in(reply, "token_logprobs").pop(3) and (200, reply), "no log-prob for"),
        (lambda status, reply: (200, with_log_prob(reply, False)), "no log-prob for"),
        (lambda status, reply: (200, with_log_prob(reply, 0.5)), "no log-prob for"),
        (lambda status, reply: (200, with_log_prob(reply, float("nan"))), "no log-prob for"),
        (lambda status, reply: found_in(reply, "tokens").reverse() or (200, reply), "vocabularies differ"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_teach_is_refused(
    folder: Path, serve: Callable[..., Any], change: Callable[..., Any], message: str
) -> None:
    url = serve(lambda body: change(*serve.correct(body)))
    with pytest.raises(UserError, match=rf"distillation.teachers.t.url={url}.*{message}"):
        tiny_run.run(folder, "refused", *STEPS, f"distillation.teachers.t={{url: '{url}', model: m}}")


def test_wrong_teachers_are_refused(folder: Path, tmp_path: Path) -> None:
    tiny_qwen2(tmp_path / "short", max_positions=16)
    tiny_qwen2(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"5": 8', '"5": 9').replace('"6": 9', '"6": 8'))
    (tmp_path / "empty").mkdir()
    for given, message in (
        (
            f"a={{path: {tmp_path}/other}}",
            "differ in 2 of 64 tokens: '5' is 8 for the policy and has id 9",
        ),
        (f"a={{path: {tmp_path}/short}}", "reads at most 16 tokens, fewer than .* = 54"),
        (f"a={{path: {tmp_path}/empty}}", "cannot be read"),
        (f"a={{path: {folder}/teacher, key: nothing}}", "a.key=nothing: no row .* found sums, talk"),
        ("a={prompt_template: '{prompt} {extra_info.hint}'}", r"has no extra_info.hint; .*\{extra_info.hint\}"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_run.run(folder, "refused", *STEPS, f"distillation.teachers.{given}")
    with pytest.raises(UserError, match="has embeddings for 64 tokens, fewer than the policy's 70"):
        larger = [f"model.path={folder}/teacher", f"model.tokenizer_path={folder}/policy"]
        tiny_run.run(folder, "refused", *STEPS, *larger, f"distillation.teachers.a.path={folder}/policy")


def test_trust_in_the_policys_code_is_no_trust_in_the_teachers() -> None:
    config = PPOConfig()
    config.model.trust_remote_code = True
    assert not teacher_network(config, Teacher("t", path="m")).trust_remote_code
    assert teacher_network(config, Teacher("t", path="m", trust_remote_code=True)).trust_remote_code


def test_privileged_prompts(folder: Path) -> None:
    """The template replaces the last message of the user; values are inserted once; long rows are left out."""
    tokenizer, config = AutoTokenizer.from_pretrained(folder / "policy"), PPOConfig()
    config.data.max_prompt_length = 48
    data = PromptDataset([str(folder / "prompts.jsonl")], tokenizer, config.data, split="train")
    batch = next(data.batches(3))
    batch.non_tensor_batch["reward_model"][1] = {"ground_truth": "{prompt}" * 2}
    responses = torch.tensor([[5, 6], [7, 0], [8, 9]])
    answered = torch.tensor([[1, 1], [1, 0], [1, 1]])
    batch.batch["responses"] = responses
    batch.batch["attention_mask"] = torch.cat([batch.batch["prompt_mask"], answered], dim=1)
    teacher = Teacher("me", prompt_template="{prompt} is {ground_truth}, {extra_info.index}")
    rows, fits = PrivilegedPrompts(teacher, tokenizer, config, None)(batch)
    assert fits.all()
    texts = ["0+0 is truth, 0", "1+1 is {prompt}{prompt}, 1", "2+2 is truth, 2"]
    for row, text in enumerate(texts):
        real = rows.batch["attention_mask"][row].bool()
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        given = [
            *tokenizer(shown, add_special_tokens=False)["input_ids"],
            *responses[row][answered[row].bool()].tolist(),
        ]
        assert rows.batch["input_ids"][row][real].tolist() == given
        assert rows.batch["position_ids"][row][real].tolist() == list(range(len(given)))
    longest = int(rows.batch["attention_mask"].sum(1).max())
    short, fits = PrivilegedPrompts(teacher, tokenizer, config, longest - 1)(batch)
    assert fits.tolist() == [True, False, True] and len(short) == 2
    assert short.batch["input_ids"][1].tolist()[-2:] == [8, 9]


def test_the_rows_of_a_teacher() -> None:
    columns = {"data_source": ["a", "b", "a"], "extra_info": [{"x": {"y": 1}}, {}, None]}
    batch = DataProto.from_dict(non_tensors={name: as_column(values) for name, values in columns.items()})
    assert rows_of(Teacher("t"), batch, "data_source").tolist() == [True] * 3
    assert rows_of(Teacher("t", key="a"), batch, "data_source").tolist() == [True, False, True]
    assert rows_of(Teacher("t", key="1"), batch, "extra_info.x.y").tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["distillation.enabled=true"], "enabled=true: there is no teacher"),
        (["distillation.teachers.t={}"], "the teacher is the policy itself"),
        (["distillation.teachers.t=5"], "teachers.t=5: expected entries"),
        (["distillation.teachers.t={pathh: x}"], "t.pathh=x is not known.*did you mean path"),
        (["distillation.teachers.t={path: 5}"], "t.path=5: expected text"),
        (["distillation.teachers.t={path: m, trust_remote_code: 1}"], "trust_remote_code=1: expected true or false"),
        (["distillation.teachers.t={path: /x, url: 'http://a/v1', model: m}"], "a teacher has only one"),
        (["distillation.teachers.t={url: a, model: m}"], "t.url=a: expected http"),
        (["distillation.teachers.t.url=http://a/v1"], "t.model is not set"),
        (["distillation.teachers.t={url: 'http://a/v1', model: m, api_key_env: NO_SUCH}"], "NO_SUCH: this environment"),
        (["distillation.teachers.t={url: 'http://a/v1', model: m}", f"{LOSS}.loss_mode=jsd_topk"], "token only"),
        (["distillation.teachers.t={url: 'http://a/v1', model: m}", "rollout.temperature=0.5"], "temperature 1: set"),
        (["distillation.teachers.t.prompt_template=hint"], r"expected a text that contains \{prompt\}"),
        (["distillation.teachers.t.path=/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["distillation.teachers={a: {path: m, key: x}, b: {path: n, key: x}}"], "2 teachers have key=x"),
        (["distillation.teacher_models={teacher_model: {model_path: m}, b: {model_path: n}}"], "verl ignores this"),
        (["distillation.teachers.t.path=m", f"{LOSS}.use_policy_gradient=false"], "does not depend on the teacher"),
        (["distillation.teachers.t.path=m", f"{LOSS}.topk_source=student", f"{LOSS}.loss_mode=jsd_topk",
          "algorithm.rollout_correction.bypass_mode=true"], "bypass_mode=true omits"),
        (["distillation.teachers.t.path=m", "distillation.teacher_key=uid"], "teacher_key=uid: expected data_source"),
    ],
)  # fmt: skip
def test_wrong_options(options: list[str], message: str) -> None:
    config = load_config(["model.path=m", "data.train_files=[x]", *options]).config
    with pytest.raises(ConfigError, match=message):
        validate(config, engines=["hf", "auto"], slots=1)


def test_verls_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multi-teacher configuration of verl: its names, its routing, the keys without effect here."""
    given = [
        "distillation.enabled=true", "distillation.n_gpus_per_node=2", "distillation.nnodes=1",
        "distillation.teacher_models.one={key: a, model_path: m, num_replicas: 1, inference: {name: vllm}}",
        "distillation.teacher_models.two.model_path=n", "distillation.teacher_models.two.key=b",
        f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=64", f"{LOSS}.use_policy_gradient=false",
        f"{LOSS}.log_prob_min_clamp=-10.0", f"{LOSS}.loss_max_clamp=10.0", f"{LOSS}.clip_ratio_low=0.2",
    ]  # fmt: skip
    config = load_config(["model.path=m", *given]).config
    one, two = config.distillation.named_teachers()
    assert (one.path, one.key, two.path, two.key) == ("m", "a", "n", "b")
    assert not list(config.distillation.check()) and config.distillation.takes_topk
    off = load_config(
        ["model.path=m", "distillation.enabled=false", "distillation.teacher_models.t.model_path=m"]
    ).config
    assert not off.distillation.is_active and not off.distillation.named_teachers()
