"""Teachers on servers that are wrong, broken, slow or silent: a row gets the teacher's numbers or counts as failed."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.trainer import tiny_run
from trainer.checkpoint.files import saved_steps
from trainer.observe.tracking import read_metrics
from trainer.ppo import teacher_server
from trainer.ppo.teacher_server import (
    OtherTokens,
    TeacherFailure,
    TeacherServer,
    TeacherStopped,
    log_probs_of,
    server_of,
)
from trainer.ray_trainer import RayPPOTrainer
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto

IDS, TEXTS = [7, 8, 9], ["a", "b", "c"]


def reply_of(tokens: Any, log_probs: Any) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": log_probs}}]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# ------------------------------------------------------------------------------------------------------- one reply


@pytest.mark.parametrize(
    ("tokens", "log_probs", "expected"),
    [
        (["a", "b", "c", "x"], [None, -1.0, -2, -3.0], [-1.0, -2.0]),
        (["a", "b", "c"], [None, -1.0, -2.0], [-1.0, -2.0]),  # the sampled token ended the text
        (["a", " b", "c\n"], [None, -9999.0, 5e-4], [-9999.0, 5e-4]),  # vLLM's minus infinity; rounding
    ],
)
def test_the_log_probs_of_a_reply(tokens: list[str], log_probs: list[Any], expected: list[float]) -> None:
    assert log_probs_of(reply_of(tokens, log_probs), IDS, TEXTS) == expected


def test_tokens_that_servers_represent_in_different_ways_are_not_compared() -> None:
    texts = ["\ufffd", "\n\n", " ", "é", "d"]
    theirs = ["bytes:\\xe4", "<0x0A>", "Ġ", " é", "\ufffdd"]
    log_probs = [None, -1.0, -1.0, -1.0, -1.0]
    assert log_probs_of(reply_of(theirs, log_probs), range(5), texts) == [-1.0] * 4


@pytest.mark.parametrize(
    "reply",
    [
        None,
        "text",
        3,
        [],
        nested(100_000),
        {"choices": nested(100_000)},
        {"choices": []},
        {"choices": {}},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"tokens": TEXTS}}]},
        {"error": "x" * 1_000_000},
        reply_of("abc", [None, -1.0, -2.0]),
        reply_of({"0": "a"}, [None, -1.0, -2.0]),
        reply_of(TEXTS, {"0": None}),
        reply_of(TEXTS, None),
        reply_of(["a", "b"], [None, -1.0]),
        reply_of(TEXTS, [None, -1.0]),
        reply_of(["a", "b"], [None, -1.0, -2.0]),
        reply_of([*TEXTS, "x"], [None, -1.0, -2.0]),
        reply_of([*TEXTS, "x", "y"], [None, -1.0, -2.0, -3.0, -4.0]),
        reply_of(["a", 8, "c"], [None, -1.0, -2.0]),
        reply_of(["a", nested(100_000), "c"], [None, -1.0, -2.0]),
    ],
)
def test_a_reply_without_a_log_prob_for_each_token_is_refused(reply: Any) -> None:
    with pytest.raises(ValueError, match="the reply has no") as caught:
        log_probs_of(reply, IDS, TEXTS)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value",
    [None, "-1.0", True, False, math.nan, math.inf, -math.inf, 0.5, -1e300, -10_001, -(10**400), 10**400, [-1.0], {}],
)
def test_a_value_that_is_no_log_prob_is_refused(value: Any) -> None:
    for values in ([None, value, -2.0], [None, -1.0, value]):
        with pytest.raises(ValueError, match=r"no log-prob for each of the 3 tokens.*from -10000 to 0"):
            log_probs_of(reply_of(TEXTS, values), IDS, TEXTS)


@pytest.mark.parametrize(
    "tokens",
    [
        ["<s>", "a", "b", "c"],  # shifted by a token at the start
        ["<s>", "a", "b"],
        ["b", "c", "a"],
        ["a", "b", "x"],
        ["a", "b", "C"],
        ["a", "", "c"],
        ["\ufffd", "\ufffd", "\ufffd"],
    ],
)
def test_a_reply_about_other_tokens_is_refused(tokens: list[str]) -> None:
    with pytest.raises(OtherTokens, match="for the policy and .* in the reply"):
        log_probs_of(reply_of(tokens, [None] + [-1.0] * (len(tokens) - 1)), IDS, TEXTS)


# ------------------------------------------------------------------------------------------------------- a server


class Letters:
    """A tokenizer whose tokens are the letters from a."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + number) for number in ids)


Answer = Callable[[BaseHTTPRequestHandler, list[int]], None]


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def answer_correctly(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
    """Returns the log-prob -id / 8 for each token."""
    tokens = [Letters().decode([number]) for number in ids]
    log_probs = [None, *(-number / 8 for number in ids[1:])]
    send(handler, json.dumps(reply_of([*tokens, "x"], [*log_probs, -1.0])).encode())


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer(self, body["prompt"])

            def do_GET(self) -> None:
                send(self, b"{}")

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def client(
    serve: Callable[[Answer], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TeacherServer]:
    """Returns a client without retries that tolerates failures."""

    def connect(answer: Answer, max_error_rate: float = 1.0) -> TeacherServer:
        config = PPOConfig()
        config.reward.max_error_rate = max_error_rate
        config.distillation.teachers = {"t": {"url": serve(answer), "model": "big"}}
        [teacher] = config.distillation.named_teachers()
        return server_of(teacher, config, Letters(), tmp_path, lambda text: None)  # type: ignore[arg-type]

    monkeypatch.setattr(teacher_server, "MAX_RETRIES", 0)
    return connect


def batch_of(rows: int) -> DataProto:
    """Prompts of two tokens and answers of two, the first row with padding."""
    ids = torch.tensor([[0, 1, 2, 0]] + [[1, 2, 3, 4]] * (rows - 1))
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, 2:]})


def redirect(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
    handler.send_response(307)
    handler.send_header("Location", handler.path)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def trickle(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        return


def with_prefix(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
    answer_correctly(handler, [18, *ids])


BROKEN: dict[str, Answer] = {
    "nested": lambda handler, ids: send(handler, b"[" * 200_000 + b"]" * 200_000),
    "long integer": lambda handler, ids: send(
        handler, json.dumps(reply_of(["a"] * len(ids), [None] * len(ids))).replace("null", "9" * 400).encode()
    ),
    "longer integer": lambda handler, ids: send(handler, b'{"choices": ' + b"9" * 9000 + b"}"),
    "no JSON": lambda handler, ids: send(handler, b"<html>"),
    "no text": lambda handler, ids: send(handler, b""),
    "no UTF-8": lambda handler, ids: send(handler, b'{"choices": "\xff\xfe"}'),
    "cut": lambda handler, ids: send(handler, b'{"choices": [', length=500),
    "no reply": lambda handler, ids: handler.connection.close(),
    "status": lambda handler, ids: send(handler, b"{}", status=503),
    "redirect": redirect,
    "trickle": trickle,
    "prefix": with_prefix,
}


def test_a_correct_server(client: Callable[..., TeacherServer]) -> None:
    columns = client(answer_correctly, max_error_rate=0.0).compute_teacher_log_prob(batch_of(3)).batch
    assert columns["has_teacher"].tolist() == [True, True, True]
    assert columns["teacher_log_probs"].tolist() == [[-2 / 8, 0.0], [-3 / 8, -4 / 8], [-3 / 8, -4 / 8]]


@pytest.mark.parametrize("name", BROKEN)
def test_the_row_of_a_broken_reply_counts_as_failed(
    client: Callable[..., TeacherServer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "REQUEST_TIMEOUT_S", 0.5 if name == "trickle" else 20.0)
    columns = client(BROKEN[name]).compute_teacher_log_prob(batch_of(1)).batch
    assert columns["has_teacher"].tolist() == [False]
    assert columns["teacher_log_probs"].abs().max() == 0
    with pytest.raises(TeacherFailure, match="1 of 1 request to a teachers failed"):
        client(BROKEN[name], max_error_rate=0.0).compute_teacher_log_prob(batch_of(1))


def test_a_server_that_hangs_is_not_asked_for_every_row(
    client: Callable[..., TeacherServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 rows, two at once: after two requests without a reply, only one that has begun meanwhile is waited for."""
    monkeypatch.setattr(teacher_server, "REQUESTS_AT_ONCE", 2)
    monkeypatch.setattr(teacher_server, "REQUEST_TIMEOUT_S", 0.2)
    requests = []
    released = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
        requests.append(ids)
        released.wait(20)

    columns = client(hang).compute_teacher_log_prob(batch_of(40)).batch
    released.set()
    assert not columns["has_teacher"].any()
    assert 2 <= len(requests) <= 3


def test_a_silent_server_ends_a_run_that_is_to_stop(
    client: Callable[..., TeacherServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "STOP_TIMEOUT_S", 0.3)
    released = threading.Event()
    server = client(lambda handler, ids: released.wait(20) and None)
    server.stop_requested = lambda: True
    begun = time.monotonic()
    with pytest.raises(TeacherStopped, match=r"distillation.teachers.t.url=http.*has not replied"):
        server.compute_teacher_log_prob(batch_of(2))
    released.set()
    assert time.monotonic() - begun < 15


def test_a_server_that_replies_completes_the_step_of_a_run_that_is_to_stop(
    client: Callable[..., TeacherServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "STOP_TIMEOUT_S", 2.0)
    monkeypatch.setattr(teacher_server, "REQUESTS_AT_ONCE", 1)

    def slowly(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
        time.sleep(0.6)
        answer_correctly(handler, ids)

    server = client(slowly)
    server.stop_requested = lambda: True
    assert server.compute_teacher_log_prob(batch_of(5)).batch["has_teacher"].all()


# ------------------------------------------------------------------------------------------------------- whole runs

STEPS = ["trainer.total_training_steps=3", "trainer.val_before_train=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_files(tmp_path_factory.mktemp("run"), [f"{number}+{number}" for number in range(8)])


class StepAware(RayPPOTrainer):
    """Publishes the current step to the server of the test, and asks to stop in step 2."""

    step = 0
    stops = False

    def compute_teacher_log_probs(self, teachers: Any, batch: DataProto) -> DataProto:
        type(self).step = self.steps.global_step
        if self.stops and self.steps.global_step == 2:
            self.steps.stop()
        return super().compute_teacher_log_probs(teachers, batch)


def policy_answer(folder: Path, change: Callable[[list[str], int], list[str]]) -> Answer:
    """Replies with the texts that `change` returns for the policy's texts and the step."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")

    def answer(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
        texts = [*(tokenizer.decode([number]) for number in ids), "x"]
        texts = change(texts, StepAware.step)
        send(handler, json.dumps(reply_of(texts, [None] + [-1.0] * (len(texts) - 1))).encode())

    return answer


def test_a_server_that_answers_other_texts_from_step_2_on_ends_the_run(
    folder: Path, serve: Callable[[Answer], str]
) -> None:
    StepAware.step, StepAware.stops = 0, False
    url = serve(policy_answer(folder, lambda texts, step: ["<s>", *texts[:-1]] if step >= 2 else texts))
    teacher = f"distillation.teachers.t={{url: '{url}', model: m}}"
    with pytest.raises(TeacherFailure, match=r"(?s)reward.max_error_rate=0.*for the policy and '<s>' in the reply"):
        tiny_run.run(folder, "other", *STEPS, teacher, "reward.max_error_rate=0", trainer_class=StepAware)
    assert StepAware.step == 2


@pytest.mark.slow
def test_a_run_that_is_to_stop_while_the_server_hangs_keeps_the_last_step(
    folder: Path, serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "STOP_TIMEOUT_S", 0.3)
    StepAware.step, StepAware.stops = 0, True
    released = threading.Event()
    correct = policy_answer(folder, lambda texts, step: texts)

    def hang_in_step_2(handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
        if StepAware.step == 2:
            released.wait(30)
        else:
            correct(handler, ids)

    teacher = f"distillation.teachers.t={{url: '{serve(hang_in_step_2)}', model: m}}"
    with pytest.raises(KeyboardInterrupt) as caught:
        tiny_run.run(folder, "hang", *STEPS, teacher, "trainer.save_freq=100", trainer_class=StepAware)
    released.set()
    given_up, how_to_continue = caught.value.__notes__
    assert "this step is given up" in given_up and "To continue" in how_to_continue
    assert list(saved_steps(folder / "hang")) == [1]
    StepAware.step = 0
    options = [teacher, "trainer.save_freq=100", "trainer.resume_mode=auto"]
    tiny_run.run(folder, "hang", *STEPS, *options)
    metrics = read_metrics(folder / "hang" / "metrics.jsonl")
    assert [metrics[step]["distillation/taught_frac"] for step in (1, 2, 3)] == [1.0, 1.0, 1.0]
