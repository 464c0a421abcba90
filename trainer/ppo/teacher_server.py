"""A teacher of distillation on an OpenAI-compatible server: its requests, the checks of its replies, and time limits.

A server can be wrong, broken or slow. A row has log-probs only if the reply repeats the tokens that were sent and has
one log-prob for each of them; otherwise the row has no teacher and counts as a failure. A request has a time limit, and
a run that is to stop does not wait for a server that is silent.
"""

import asyncio
import reprlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from trainer.rewards.failures import FailureLog
from verl_lite.config import PPOConfig
from verl_lite.config.distillation import Teacher
from verl_lite.json_types import JsonValue
from verl_lite.machine.event_loop import run_async
from verl_lite.protocol import DataProto
from verl_lite.rewards.judge import JudgeServer, RemoteRewardError

REQUESTS_AT_ONCE = 32
"""Requests to a server that run at the same time. As many timeouts in a row end the requests of a batch."""
MAX_RETRIES = 3
"""Retries of a request that a server refuses for a reason that may pass, such as a rate limit."""
REQUEST_TIMEOUT_S = 180.0
"""Time limit of a request with its retries. Long prompts of many requests at once need a minute on a busy server."""
STOP_TIMEOUT_S = 15.0
"""Longest silence of the servers after the run was asked to stop; batch systems kill it after 30 s or more."""
LOWEST_LOG_PROB = -1e4
"""Smallest log-prob of a reply: vLLM sends -9999 for a token that the teacher excludes."""
HIGHEST_LOG_PROB = 1e-3
"""Largest log-prob of a reply, above 0 because of rounding."""

_KEPT_FAILURES = 100  # of each batch, in teacher_failures.jsonl
_INCOMPLETE = "\ufffd"  # stands for a part of a character

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 300


class TeacherFailure(RuntimeError):
    """Raised if too many requests to a teacher's server failed. Contains the first failure of the batch."""


class TeacherStopped(RuntimeError):
    """Raised if the run is to stop and a teacher's server is silent, so that the current step cannot be completed."""


class OtherTokens(ValueError):
    """Raised if a reply contains other tokens than the request."""


class TeacherServer:
    """A teacher on an OpenAI-compatible server, which returns the log-probs of the prompt's tokens (`echo`).

    Args:
        teacher: the teacher.
        failures: counts the failed requests.
        tokenizer: the policy's, whose texts of tokens are compared with the reply's.

    Attributes:
        stop_requested: returns True if the run is to stop; may be replaced after construction.
    """

    def __init__(self, teacher: Teacher, failures: FailureLog, tokenizer: PreTrainedTokenizerBase) -> None:
        self.teacher = teacher
        self.failures = failures
        self.tokenizer = tokenizer
        self.stop_requested: Callable[[], bool] = lambda: False
        url = f"{str(teacher.url).rstrip('/')}/completions"
        option = f"distillation.teachers.{teacher.name}.api_key_env"
        self.endpoint = JudgeServer(url, max_retries=MAX_RETRIES, api_key_env=teacher.api_key_env, option=option)
        self._texts: dict[int, str] = {}  # text of each token that was sent
        self._timeouts_in_a_row = 0
        self._last_reply_at = 0.0
        self._stop_noticed_at: float | None = None

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Returns teacher_log_probs (n, R) and has_teacher (n,).

        Raises:
            TeacherFailure: too many requests failed.
            TeacherStopped: the run is to stop, and the server has not replied for `STOP_TIMEOUT_S`.
        """
        columns = batch.batch
        mask = columns["attention_mask"].bool()
        width = columns["responses"].shape[1]
        response_mask = mask[:, -width:]
        sequences = []
        for ids, is_token in zip(columns["input_ids"], mask, strict=True):
            sequences.append(ids[is_token].tolist())

        self._timeouts_in_a_row = 0
        self._last_reply_at = time.monotonic()
        results = run_async(self._request_all(sequences), self._raise_if_stopped)

        log_probs = torch.zeros(response_mask.shape)
        has_teacher = torch.zeros(len(results), dtype=torch.bool)
        errors = []
        for row, result in enumerate(results):
            if isinstance(result, str):
                errors.append(result)
                continue
            is_response = response_mask[row]
            # the response is at the end of the sequence; not result[-n:], which has all entries for n = 0
            start = len(result) - int(is_response.sum())
            log_probs[row, is_response] = torch.tensor(result[start:])
            has_teacher[row] = True

        self._note_failures(errors, len(results))
        return DataProto.from_dict(tensors={"teacher_log_probs": log_probs, "has_teacher": has_teacher})

    def _note_failures(self, errors: Sequence[str], num_requests: int) -> None:
        """Counts the failed requests of a batch. Raises TeacherFailure if they are too many."""
        failed_rows = [{"teacher": self.teacher.name, "error": error} for error in errors[:_KEPT_FAILURES]]
        first_error = None
        if errors:
            first_error = errors[0]
        self.failures.note(len(errors), num_requests, failed_rows, first_error)

    async def request(self, ids: list[int]) -> list[float]:
        """Returns the log-probs of the tokens after the first.

        Raises:
            OtherTokens: the reply contains other tokens than `ids`.
            ValueError: the reply does not have exactly one log-prob for each of them.
            RemoteRewardError: the request failed or exceeded `REQUEST_TIMEOUT_S`.
        """
        # the import takes a second, and few runs need it
        import openai

        body = {
            "model": self.teacher.model,
            "prompt": ids,
            "max_tokens": 1,
            "echo": True,
            "logprobs": 1,
            "temperature": 1.0,
        }
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                reply = await self.endpoint.post(body)
        except TimeoutError as error:
            self._timeouts_in_a_row += 1
            raise RemoteRewardError(
                f"{self.endpoint.url} sent no complete reply within {REQUEST_TIMEOUT_S:g} s"
            ) from error
        except (openai.OpenAIError, RecursionError) as error:
            message = f"{self.endpoint.url}: the reply cannot be read ({type(error).__name__}: {error!s:.300})"
            raise RemoteRewardError(message) from error
        finally:
            self._last_reply_at = time.monotonic()
        self._timeouts_in_a_row = 0
        texts = [self._text(token) for token in ids]
        return log_probs_of(reply, ids, texts)

    async def _request_all(self, prompts: Sequence[list[int]]) -> list[list[float] | str]:
        """Returns the log-probs of each prompt's tokens after the first, or the text of the error."""
        limit = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def request(ids: list[int]) -> list[float] | str:
            async with limit:
                # a large batch would wait for hours for a server that hangs
                if self._timeouts_in_a_row >= REQUESTS_AT_ONCE:
                    return f"not sent, because {self._timeouts_in_a_row} requests before had no reply in time"
                try:
                    return await self.request(ids)
                except (RemoteRewardError, ValueError) as error:
                    return str(error)

        return await asyncio.gather(*map(request, prompts))

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]

    def _raise_if_stopped(self) -> None:
        """Raises TeacherStopped if the run is to stop and the server is silent."""
        if not self.stop_requested():
            return
        if self._stop_noticed_at is None:
            self._stop_noticed_at = time.monotonic()
        # a server that still replies completes the step
        silent_since = max(self._stop_noticed_at, self._last_reply_at)
        silent_s = time.monotonic() - silent_since
        if silent_s > STOP_TIMEOUT_S:
            raise TeacherStopped(
                f"distillation.teachers.{self.teacher.name}.url={self.teacher.url}: the run is to stop, and the server "
                f"has not replied for {silent_s:.0f} s, so this step is given up"
            )


def log_probs_of(reply: JsonValue, ids: Sequence[int], texts: Sequence[str]) -> list[float]:
    """Returns the log-probs of all tokens after the first from the reply to a request with `echo`.

    Args:
        reply: parsed JSON of any content.
        ids: number of each token that was sent.
        texts: text of each token that was sent.

    Raises:
        OtherTokens: the reply contains other tokens, for example a token that the server puts before the prompt.
        ValueError: the reply is no completion with one log-prob for each token.
    """
    problem = "the reply has no log-probs of the prompt's tokens"
    if not isinstance(reply, dict):
        raise ValueError(f"{problem}: {_shown(reply)}")
    try:
        logprobs = reply["choices"][0]["logprobs"]
        tokens = logprobs["tokens"]
        log_probs = logprobs["token_logprobs"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{problem}: {_shown(reply)}") from error
    if not isinstance(tokens, list) or not isinstance(log_probs, list):
        raise ValueError(f"{problem}: {_shown(logprobs)}")

    # after the prompt comes the sampled token, which servers leave out if it ends the text
    if len(tokens) != len(log_probs) or len(tokens) - len(ids) not in (0, 1):
        raise ValueError(
            f"the reply has no log-prob for each of the {len(ids)} tokens, but {len(log_probs)} log-probs of "
            f"{len(tokens)} tokens, where the prompt and at most one more are expected: {_shown(logprobs)}"
        )
    for token, text, reply_text in zip(ids, texts, tokens[: len(ids)], strict=True):
        if not isinstance(reply_text, str):
            raise ValueError(f"the reply has no text for the token {token}, but {_shown(reply_text)}")
        if _is_other_text(text, reply_text):
            raise OtherTokens(
                f"the token {token} is {text!r} for the policy and {_shown(reply_text)} in the reply: either the "
                "server adds or replaces tokens, or the vocabularies differ"
            )

    # the first token follows no other one and has no log-prob
    values = log_probs[1 : len(ids)]
    for value in values:
        # the type excludes bool, which is an int; a NaN fails every comparison; a long integer does not fit a float
        is_number = type(value) in (float, int) and LOWEST_LOG_PROB <= value <= HIGHEST_LOG_PROB
        if not is_number:
            raise ValueError(
                f"the reply has no log-prob for each of the {len(ids)} tokens: found {_shown(value)}, expected numbers "
                f"from {LOWEST_LOG_PROB:g} to 0"
            )
    return [float(value) for value in values]


def _is_other_text(text: str, reply_text: str) -> bool:
    """Returns True if two texts of a token differ by more than white space."""
    if text == reply_text:
        return False
    # servers represent a token that is a part of a character, or has no visible text, in different ways
    visible = text.strip()
    if not visible or not visible.isprintable() or _INCOMPLETE in visible:
        return False
    return reply_text.replace(_INCOMPLETE, "").strip() != visible


def _shown(value: object) -> str:
    """Returns the beginning of the representation of a value of any depth and size."""
    return _shortened.repr(value)[:300]


def server_of(
    teacher: Teacher,
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path = Path(),
    show: Callable[[str], None] = print,
) -> TeacherServer:
    """Returns the client of a teacher with a url.

    Args:
        teacher: the teacher.
        config: the options of the run.
        tokenizer: the policy's.
        run_dir: folder of the file teacher_failures.jsonl.
        show: receives the text of the first failed request.
    """
    path = run_dir / "teacher_failures.jsonl"
    limit = config.reward.max_error_rate
    failures = FailureLog("request to a teacher", "reward.max_error_rate", limit, TeacherFailure, path, show)
    return TeacherServer(teacher, failures, tokenizer)
