"""The teachers of on-policy distillation on the driver: selects the teacher of each row and collects its log-probs.

A teacher is a worker group with a model of its own, the policy's group, or an OpenAI-compatible server
(`trainer.ppo.teacher_server`). All of them read the student's response; a `prompt_template` replaces the last user
message of the prompt before it, for example by one with a hint. `check_teachers` compares vocabularies and rows with
the teachers before any worker starts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.data.prompts import PromptDataset
from trainer.data.tokens import Prompt, encode_prompts
from trainer.ppo.requirements import micro_batching
from trainer.ppo.roles import TeacherRole
from trainer.ppo.teacher_server import OtherTokens, TeacherServer, server_of
from trainer.rewards.model_inputs import check_same_vocabulary
from verl_lite.config import PPOConfig
from verl_lite.config.distillation import Teacher
from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage
from verl_lite.machine.event_loop import run_async
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards.judge import RemoteRewardError
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.policy.loading import load_model_config, longest_context
from workers.policy.model_errors import user_error_on_failure
from workers.roles.frozen_models import teacher_network
from workers.rollout.rows import left_padded

PROBED_TOKENS = 64
"""Tokens of the vocabulary whose texts are compared with a server before the run starts."""
# only these names; other braces of a template are literal
_PLACEHOLDER = re.compile(r"\{(prompt|ground_truth|extra_info\.\w[\w.]*)\}")


class TeacherScorer(Protocol):
    """Computes the log-probs of one teacher."""

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Returns teacher_log_probs (n, R), or teacher_topk_log_probs and teacher_ids (n, R, K). A server also returns
        has_teacher (n,): False for rows whose request failed."""
        ...


class Teachers:
    """Computes the columns of distillation for a batch.

    Args:
        config: the options of the run.
        scorers: scorer of each teacher by name.
        prompts: `PrivilegedPrompts` by name, of the teachers with a template.
    """

    def __init__(
        self, config: PPOConfig, scorers: dict[str, TeacherScorer], prompts: "dict[str, PrivilegedPrompts]"
    ) -> None:
        self.config = config
        self.scorers = scorers
        self.prompts = prompts

    def watch_for_stop(self, stop_requested: Callable[[], bool]) -> None:
        """Makes servers give up if they are silent when `stop_requested` returns True."""
        for scorer in self.scorers.values():
            if isinstance(scorer, TeacherServer):
                scorer.stop_requested = stop_requested

    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Returns the columns of `TeacherScorer.compute_teacher_log_prob`, has_teacher, and meta_info metrics.

        Rows without a teacher, with a privileged prompt that is too long, or with a failed request have has_teacher
        False and no weight in the distillation loss. The metric distillation/taught_frac is the share of the others.
        """
        distillation = self.config.distillation
        columns = {"has_teacher": torch.zeros(len(batch), dtype=torch.bool)}
        for teacher in distillation.named_teachers():
            is_taught = rows_of(teacher, batch, distillation.teacher_key)
            rows = np.flatnonzero(is_taught)
            rows_to_score = batch.select_idxs(rows)
            if len(rows) and teacher.name in self.prompts:
                rows_to_score, fits = self.prompts[teacher.name](rows_to_score)
                rows = rows[fits]
            if not len(rows):
                continue

            scorer = self.scorers[teacher.name]
            scored = scorer.compute_teacher_log_prob(rows_to_score).batch
            # a server replaces has_teacher: it is False for rows whose request failed
            scored_columns = {"has_teacher": torch.ones(len(rows), dtype=torch.bool)}
            for name in scored.keys():
                scored_columns[str(name)] = scored[name]
            for name, values in scored_columns.items():
                # the rows of other teachers, and rows without one, have zeros
                if name not in columns:
                    columns[name] = values.new_zeros(len(batch), *values.shape[1:])
                columns[name][rows] = values

        # the loss reads the columns of teachers in every batch
        if len(columns) == 1:
            columns |= self._no_log_probs(batch)
        num_taught = float(columns["has_teacher"].sum())
        metrics = {"distillation/taught_frac": Metric.mean(num_taught, len(batch))}
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    def _no_log_probs(self, batch: DataProto) -> dict[str, torch.Tensor]:
        """Returns the columns of a batch in which no row has a teacher."""
        shape = batch.batch["responses"].shape
        if not self.config.distillation.takes_topk:
            return {"teacher_log_probs": torch.zeros(shape)}
        if "teacher_ids" in batch:
            ids = batch.batch["teacher_ids"]
        else:
            ids = torch.zeros(*shape, 1, dtype=torch.int32)
        return {"teacher_ids": ids, "teacher_topk_log_probs": torch.zeros(ids.shape)}


def rows_of(teacher: Teacher, batch: DataProto, teacher_key: str) -> np.ndarray:
    """Returns (B,) bool: True for the rows whose value in the column `teacher_key` is the teacher's."""
    if teacher.key is None:
        return np.ones(len(batch), dtype=bool)
    is_taught = [key == teacher.key for key in _teacher_keys(batch, teacher_key)]
    return np.array(is_taught, dtype=bool)


def _teacher_keys(batch: DataProto, teacher_key: str) -> list[str]:
    """Returns the value of each row that selects its teacher, as text."""
    column, _, entry = teacher_key.partition(".")
    values = batch.non_tensor_batch[column]
    if entry:
        return [str(_nested_entry(value, entry)) for value in values]
    return [str(value) for value in values]


def _nested_entry(info: object, name: str) -> object:
    """Returns the entry `a.b` of nested dicts; None if it is missing."""
    for part in name.split("."):
        if not isinstance(info, dict):
            return None
        info = info.get(part)
    return info


class PrivilegedPrompts:
    """Replaces the prompts of a batch by those of a teacher with a template.

    The template replaces the last user message. It contains {prompt}, the message, and may contain {ground_truth} and
    {extra_info.NAME}.

    Args:
        teacher: a teacher with a template.
        tokenizer: the policy's.
        config: the options of the run.
        longest: largest number of tokens of prompt and response; None = no limit.
    """

    def __init__(
        self, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, config: PPOConfig, longest: int | None
    ) -> None:
        assert teacher.prompt_template is not None
        self.name = teacher.name
        self.template = teacher.prompt_template
        self.tokenizer = tokenizer
        self.data_config = config.data
        self.longest = longest

    def __call__(self, batch: DataProto) -> tuple[DataProto, np.ndarray]:
        """Replaces the prompts of the rows.

        Returns:
            The rows with input_ids, attention_mask and position_ids of the teacher's prompt and the response, without
            rows that are too long; and (B,) bool, True for the rows that are left.
        """
        prompts = self._prompt_tokens(batch)
        prompt_lengths = np.array([len(prompt) for prompt in prompts])
        width = batch.batch["responses"].shape[1]
        response_mask = batch.batch["attention_mask"][:, -width:]
        lengths = prompt_lengths + response_mask.sum(1).numpy()
        fits = np.ones(len(batch), dtype=bool)
        if self.longest is not None:
            fits = lengths <= self.longest

        rows = np.flatnonzero(fits)
        result = batch.select_idxs(rows)
        if len(rows):
            fitting_prompts = [prompts[row] for row in rows]
            result.batch.update(self._inputs(fitting_prompts, result))
        return result, fits

    def _prompt_tokens(self, batch: DataProto) -> list[list[int]]:
        """Returns the token ids of the teacher's prompt of each row."""
        uids = batch.non_tensor_batch["uid"]
        # the rows of a prompt differ only in their answers, so each prompt is encoded once
        chats: dict[str, Prompt] = {}
        for row, uid in enumerate(uids):
            if uid not in chats:
                chats[uid] = Prompt(self.messages(batch, row))
        encoded = encode_prompts(list(chats.values()), self.tokenizer, self.data_config)
        tokens_of_uid = {uid: tokens.tolist() for uid, tokens in zip(chats, encoded, strict=True)}
        return [tokens_of_uid[uid] for uid in uids]

    def _inputs(self, prompts: list[list[int]], rows: DataProto) -> dict[str, torch.Tensor]:
        """Returns the token columns of the prompts, padded on the left, followed by the responses of the rows."""
        responses = rows.batch["responses"]
        width = responses.shape[1]
        response_mask = rows.batch["attention_mask"][:, -width:]
        longest_prompt = max(map(len, prompts))
        pad_token_id = int(self.tokenizer.pad_token_id)
        prompt_ids, prompt_mask = left_padded(prompts, longest_prompt, pad_token_id)

        mask = torch.cat([prompt_mask, response_mask], dim=1)
        # padding has position 0; the first token has it, too
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": mask,
            "position_ids": positions,
        }

    def messages(self, batch: DataProto, row: int) -> list[ChatMessage]:
        """Returns the teacher's messages. Raises UserError if the prompt has no user message or an entry is missing."""
        columns = batch.non_tensor_batch
        uid = columns["uid"][row]
        option = f"distillation.teachers.{self.name}.prompt_template"
        # copies, because the content of the last message is replaced
        chat = [dict(message) for message in columns["raw_prompt"][row]]
        user_messages = [message for message in chat if message["role"] == "user"]
        if not user_messages:
            raise UserError(f"{option}: the prompt {uid} has no message of the user")

        last = user_messages[-1]
        values: dict[str, object] = {
            "prompt": last["content"],
            "ground_truth": columns["reward_model"][row].get("ground_truth"),
            "extra_info": columns["extra_info"][row],
        }

        def value_of(placeholder: re.Match[str]) -> str:
            name = placeholder[1]
            value = _nested_entry(values, name)
            if value is None:
                raise UserError(
                    f"{option}: the prompt {uid} has no {name}; add it to the data, or "
                    f"leave {{{name}}} out of the template"
                )
            return str(value)

        # in a single pass, because the values may contain placeholders themselves
        last["content"] = _PLACEHOLDER.sub(value_of, self.template)
        return chat


def build_teachers(
    config: PPOConfig,
    groups: Mapping[str, WorkerGroup],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    show: Callable[[str], None],
) -> Teachers | None:
    """Returns the teachers of a run, or None without distillation.

    Args:
        config: the options of the run.
        groups: worker groups by role.
        tokenizer: the policy's.
        run_dir: the run folder, where servers write their failures.
        show: receives the text of the first failed request.
    """
    scorers: dict[str, TeacherScorer] = {}
    for teacher in config.distillation.named_teachers():
        if teacher.url:
            scorers[teacher.name] = server_of(teacher, config, tokenizer, run_dir, show)
            continue
        role = role_of(teacher)
        if teacher.is_policy:
            role = "actor_rollout"
        scorers[teacher.name] = TeacherRole(groups[role], config, teacher.is_policy)
    if not scorers:
        return None
    prompts = privileged_prompts(config, tokenizer)
    return Teachers(config, scorers, prompts)


def role_of(teacher: Teacher) -> str:
    """Returns the role of the worker group of a teacher with a path."""
    return f"teacher_{teacher.name}"


def privileged_prompts(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, PrivilegedPrompts]:
    """Returns the prompts of the teachers with a template by name."""
    prompts = {}
    for teacher in config.distillation.named_teachers():
        if teacher.prompt_template is not None:
            longest = _longest_sequence(config, teacher)
            prompts[teacher.name] = PrivilegedPrompts(teacher, tokenizer, config, longest)
    return prompts


def _longest_sequence(config: PPOConfig, teacher: Teacher) -> int | None:
    """Returns the largest number of tokens of prompt and response that a teacher can read; None = not known."""
    if teacher.url:
        return None
    if teacher.is_policy:
        model_config = load_model_config(config.model)
        stage = "log_prob"
        section = "actor"
    else:
        model_config = load_model_config(teacher_network(config, teacher))
        stage = "ref"
        section = "ref"

    context = longest_context(model_config)
    budget = micro_batching(config, stage).max_token_len
    if budget is None:
        return context
    # a sequence must fit a micro-batch, which the ranks of `sequence_parallel_size` hold together
    budget *= config.sequence_parallel_size(section)
    if context is None:
        return budget
    return min(context, budget)


def check_teachers(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, data: Sequence[PromptDataset] = ()) -> None:
    """Raises UserError for a teacher that cannot score the policy's tokens, and for rows without a teacher.

    Args:
        config: the options of the run.
        tokenizer: the policy's.
        data: the training prompts; empty for episodes, whose rows are not known before they are sampled.
    """
    teachers = config.distillation.named_teachers()
    if not teachers:
        return
    for teacher in teachers:
        option = f"distillation.teachers.{teacher.name}"
        if teacher.path:
            _check_model(config, teacher, tokenizer, option)
        elif teacher.url:
            _check_server(server_of(teacher, config, tokenizer), tokenizer, option)

    prompts = privileged_prompts(config, tokenizer)
    teacher_key = config.distillation.teacher_key
    keys: set[str] = set()
    for dataset in data:
        for batch in dataset.batches(1024):
            _check_rows(config, prompts, batch)
            keys |= set(_teacher_keys(batch, teacher_key))
    for teacher in teachers:
        if data and teacher.key is not None and teacher.key not in keys:
            raise UserError(
                f"distillation.teachers.{teacher.name}.key={teacher.key}: no row of the training data has this value "
                f"in {teacher_key} (distillation.teacher_key); found {', '.join(sorted(keys)[:20])}"
            )


def _check_rows(config: PPOConfig, prompts: Mapping[str, PrivilegedPrompts], batch: DataProto) -> None:
    """Raises UserError for a row of the training data that needs a teacher and has none, or does not fit the template
    of its teacher."""
    teacher_key = config.distillation.teacher_key
    has_teacher = np.zeros(len(batch), dtype=bool)
    for teacher in config.distillation.named_teachers():
        is_taught = rows_of(teacher, batch, teacher_key)
        has_teacher |= is_taught
        if teacher.name in prompts:
            for row in np.flatnonzero(is_taught):
                # raises for a row that does not fit the template, before the run starts
                prompts[teacher.name].messages(batch, int(row))

    # with task rewards, the policy learns from those on rows without a teacher
    if not has_teacher.all() and config.distillation.replaces_rewards:
        untaught_key = _teacher_keys(batch, teacher_key)[int(has_teacher.argmin())]
        raise UserError(
            f"distillation.teachers: no teacher has key={untaught_key}, a value of {teacher_key} in "
            "the training data; name a teacher of these rows, or set distillation_loss.use_task_rewards=true"
        )


def _check_model(config: PPOConfig, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, option: str) -> None:
    """Raises UserError if the teacher's vocabulary or context does not contain the policy's samples."""
    remedy = "expected a folder of a causal language model with its tokenizer, in Hugging Face format"
    with user_error_on_failure(f"{option}.path={teacher.path!r} cannot be read", remedy):
        network = load_model_config(teacher_network(config, teacher))
        theirs = AutoTokenizer.from_pretrained(teacher.path, trust_remote_code=teacher.trust_remote_code)
    problem = f"{option}.path={teacher.path!r}: the teacher reads the policy's token ids"
    check_same_vocabulary(tokenizer, theirs, problem, "teacher", "use a teacher of the same model family")

    # equal tokenizers are not enough: models of a family round the size of their embeddings differently
    policy_network = load_model_config(config.model)
    policy_size = policy_network.get_text_config().vocab_size
    teacher_size = network.get_text_config().vocab_size
    if teacher_size < policy_size:
        raise UserError(
            f"{problem}, but has embeddings for {teacher_size} tokens, fewer than the policy's {policy_size}; use a "
            "teacher with at least as many"
        )
    context = longest_context(network)
    if context is not None and context < config.longest_sample:
        raise UserError(
            f"{option}.path={teacher.path!r}: it reads at most {context} tokens, fewer than data.max_prompt_length + "
            f"data.max_response_length = {config.longest_sample}; lower these, or use another teacher"
        )


def _check_server(server: TeacherServer, tokenizer: PreTrainedTokenizerBase, option: str) -> None:
    """Raises UserError if a server does not return log-probs, or if it decodes token ids to other texts."""
    # spread over the vocabulary; a set, because a small one has fewer tokens
    last_id = len(tokenizer) - 1
    ids = sorted({int(number) for number in np.linspace(0, last_id, PROBED_TOKENS)})
    where = f"{option}.url={server.teacher.url}"
    try:
        run_async(server.request(ids))
    except OtherTokens as error:
        raise UserError(f"{where}: {error}; use a teacher of the same model family") from error
    except (RemoteRewardError, ValueError) as error:
        raise UserError(
            f"{where}: expected log-probs of the prompt's tokens for a request with echo=true and logprobs=1, as vLLM "
            f"returns them; found: {error}"
        ) from error
