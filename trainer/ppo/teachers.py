"""The teachers of on-policy distillation on the driver: selects the teacher of each row and collects its log-probs.

A teacher is a worker group with a model of its own, the policy's group, or an OpenAI-compatible server
(`trainer.ppo.teacher_server`). All of them read the student's response; a `prompt_template` replaces the last user
message of the prompt before it, for example by one with a hint. `check_teachers` compares vocabularies and rows with
the teachers before any worker starts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.data.prompts import PromptDataset
from trainer.data.tokens import Prompt, encode_prompts
from trainer.ppo.requirements import micro_batching
from trainer.ppo.roles import TeacherRole
from trainer.ppo.teacher_server import OtherTokens, TeacherServer, run_async, server_of
from trainer.rewards.model_inputs import check_same_vocabulary
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.config.distillation import Teacher
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards.judge import RemoteRewardError
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.policy.loading import load_model_config, longest_context
from workers.policy.model_errors import user_error_on_failure
from workers.roles.frozen_models import teacher_network
from workers.rollout.rows import left_padded

PROBED_TOKENS = 64
_PLACEHOLDER = re.compile(r"\{(prompt|ground_truth|extra_info\.\w[\w.]*)\}")


class TeacherScorer(Protocol):
    """Computes the log-probs of one teacher."""

    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Returns teacher_log_probs (n, R), or teacher_topk_log_probs and teacher_ids (n, R, K). A server also returns
        has_teacher (n,): False for rows whose request failed."""
        ...


class Teachers:
    """Computes the columns of distillation for a batch.

    scorers: scorer of each teacher by name. prompts: `PrivilegedPrompts` by name, of teachers with a template.
    """

    def __init__(
        self, config: PPOConfig, scorers: dict[str, TeacherScorer], prompts: "dict[str, PrivilegedPrompts]"
    ) -> None:
        self.config, self.scorers, self.prompts = config, scorers, prompts

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
        columns = {"has_teacher": torch.zeros(len(batch), dtype=torch.bool)}
        for teacher in self.config.distillation.named_teachers():
            rows = np.flatnonzero(rows_of(teacher, batch, self.config.distillation.teacher_key))
            part = batch.select_idxs(rows)
            if len(rows) and teacher.name in self.prompts:
                part, fits = self.prompts[teacher.name](part)
                rows = rows[fits]
            if not len(rows):
                continue
            found = {"has_teacher": torch.ones(len(rows), dtype=torch.bool)}
            scored = self.scorers[teacher.name].compute_teacher_log_prob(part).batch
            found |= {str(name): scored[name] for name in scored.keys()}
            for name, values in found.items():
                columns.setdefault(name, values.new_zeros(len(batch), *values.shape[1:]))[rows] = values
        if len(columns) == 1:
            columns |= self._no_log_probs(batch)
        taught = float(columns["has_teacher"].sum())
        metrics = {"distillation/taught_frac": Metric.mean(taught, len(batch))}
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    def _no_log_probs(self, batch: DataProto) -> dict[str, torch.Tensor]:
        """Returns the columns of a batch in which no row has a teacher."""
        shape = batch.batch["responses"].shape
        if not self.config.distillation.takes_topk:
            return {"teacher_log_probs": torch.zeros(shape)}
        ids = batch.batch["teacher_ids"] if "teacher_ids" in batch else torch.zeros(*shape, 1, dtype=torch.int32)
        return {"teacher_ids": ids, "teacher_topk_log_probs": torch.zeros(ids.shape)}


def rows_of(teacher: Teacher, batch: DataProto, teacher_key: str) -> np.ndarray:
    """Returns (B,) bool: True for the rows whose value in the column `teacher_key` is the teacher's."""
    if teacher.key is None:
        return np.ones(len(batch), dtype=bool)
    return np.array([value == teacher.key for value in _keys(batch, teacher_key)], dtype=bool)


def _keys(batch: DataProto, teacher_key: str) -> list[str]:
    column, _, entry = teacher_key.partition(".")
    values = batch.non_tensor_batch[column]
    return [str(_entry(value, entry) if entry else value) for value in values]


def _entry(info: Any, name: str) -> Any:
    """Returns the entry `a.b` of nested dicts; None if it is missing."""
    for part in name.split("."):
        info = info.get(part) if isinstance(info, dict) else None
    return info


class PrivilegedPrompts:
    """Replaces the prompts of a batch by those of a teacher with a template.

    The template replaces the last user message. It contains {prompt}, the message, and may contain {ground_truth} and
    {extra_info.NAME}. longest: largest number of tokens of prompt and response.
    """

    def __init__(
        self, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, config: PPOConfig, longest: int | None
    ) -> None:
        assert teacher.prompt_template is not None
        self.name, self.template = teacher.name, teacher.prompt_template
        self.tokenizer, self.data_config, self.longest = tokenizer, config.data, longest

    def __call__(self, batch: DataProto) -> tuple[DataProto, np.ndarray]:
        """Returns the rows with input_ids, attention_mask and position_ids of the teacher's prompt and the response,
        without rows that are too long, and (B,) bool: True for the rows that are left."""
        columns, places = batch.non_tensor_batch, dict[str, int]()
        for row, uid in enumerate(columns["uid"]):  # rows of a prompt share its tokens
            places.setdefault(uid, row)
        messages = [Prompt(self.messages(batch, row)) for row in places.values()]
        encoded = dict(zip(places, encode_prompts(messages, self.tokenizer, self.data_config), strict=True))
        tokens = [encoded[uid].tolist() for uid in columns["uid"]]
        width = batch.batch["responses"].shape[1]
        answered = batch.batch["attention_mask"][:, -width:]
        lengths = np.array([len(row) for row in tokens]) + answered.sum(1).numpy()
        fits = np.ones(len(batch), dtype=bool) if self.longest is None else lengths <= self.longest
        rows = np.flatnonzero(fits)
        result = batch.select_idxs(rows)
        if len(rows):
            result.batch.update(self._inputs([tokens[row] for row in rows], result))
        return result, fits

    def _inputs(self, prompts: list[list[int]], rows: DataProto) -> dict[str, torch.Tensor]:
        responses = rows.batch["responses"]
        answered = rows.batch["attention_mask"][:, -responses.shape[1] :]
        pad_token_id = int(self.tokenizer.pad_token_id)
        ids, mask = left_padded(prompts, max(map(len, prompts)), pad_token_id)
        ids, mask = torch.cat([ids, responses], dim=1), torch.cat([mask, answered], dim=1)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def messages(self, batch: DataProto, row: int) -> list[dict[str, str]]:
        """Returns the teacher's messages. Raises UserError if the prompt has no user message or an entry is missing."""
        columns = {name: batch.non_tensor_batch[name][row] for name in ("raw_prompt", "reward_model", "extra_info")}
        chat = [dict(message) for message in columns["raw_prompt"]]
        last = next((message for message in reversed(chat) if message["role"] == "user"), None)
        at = f"distillation.teachers.{self.name}.prompt_template"
        if last is None:
            raise UserError(f"{at}: the prompt {batch.non_tensor_batch['uid'][row]} has no message of the user")
        values = {"prompt": last["content"], "ground_truth": columns["reward_model"].get("ground_truth")}

        def value(found: re.Match[str]) -> str:
            name = found[1]
            text = values[name] if name in values else _entry({"extra_info": columns["extra_info"]}, name)
            if text is None:
                raise UserError(
                    f"{at}: the prompt {batch.non_tensor_batch['uid'][row]} has no {name}; add it to the data, or "
                    f"leave {{{name}}} out of the template"
                )
            return str(text)

        last["content"] = _PLACEHOLDER.sub(value, self.template)  # a single pass: values may contain placeholders
        return chat


def build_teachers(
    config: PPOConfig,
    groups: Mapping[str, WorkerGroup],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    show: Callable[[str], None],
) -> Teachers | None:
    """Returns the teachers of a run, or None without distillation. groups: worker groups by role. show: receives the
    text of the first failed request."""
    scorers: dict[str, TeacherScorer] = {}
    for teacher in config.distillation.named_teachers():
        if teacher.url:
            scorers[teacher.name] = server_of(teacher, config, tokenizer, run_dir, show)
        else:
            role = "actor_rollout" if teacher.is_policy else role_of(teacher)
            scorers[teacher.name] = TeacherRole(groups[role], config, teacher.is_policy)
    return Teachers(config, scorers, privileged_prompts(config, tokenizer)) if scorers else None


def role_of(teacher: Teacher) -> str:
    """Returns the role of the worker group of a teacher with a path."""
    return f"teacher_{teacher.name}"


def privileged_prompts(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, PrivilegedPrompts]:
    """Returns the prompts of the teachers with a template by name."""
    found = {}
    for teacher in config.distillation.named_teachers():
        if teacher.prompt_template is None:
            continue
        limits = [] if teacher.url else [longest_context(load_model_config(_network(config, teacher)))]
        budget = micro_batching(config, "log_prob" if teacher.is_policy else "ref").max_token_len
        if budget is not None and not teacher.url:
            limits.append(budget * config.sequence_parallel_size("actor" if teacher.is_policy else "ref"))
        longest = min((limit for limit in limits if limit is not None), default=None)
        found[teacher.name] = PrivilegedPrompts(teacher, tokenizer, config, longest)
    return found


def _network(config: PPOConfig, teacher: Teacher) -> NetworkConfig:
    return config.model if teacher.is_policy else teacher_network(config, teacher)


def check_teachers(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, data: Sequence[PromptDataset] = ()) -> None:
    """Raises UserError for a teacher that cannot score the policy's tokens, and for rows without a teacher.

    data: the training prompts; empty for episodes, whose rows are not known before they are sampled.
    """
    teachers = config.distillation.named_teachers()
    for teacher in teachers:
        at = f"distillation.teachers.{teacher.name}"
        if teacher.path:
            _check_model(config, teacher, tokenizer, at)
        elif teacher.url:
            _check_server(server_of(teacher, config, tokenizer), tokenizer, at)
    if not teachers:
        return
    prompts, teacher_key = privileged_prompts(config, tokenizer), config.distillation.teacher_key
    seen: set[str] = set()
    for batch in (batch for dataset in data for batch in dataset.batches(1024)):
        keys = _keys(batch, teacher_key)
        taught = np.zeros(len(batch), dtype=bool)
        for teacher in teachers:
            rows = rows_of(teacher, batch, teacher_key)
            taught |= rows
            if teacher.name in prompts:
                for row in np.flatnonzero(rows):
                    prompts[teacher.name].messages(batch, int(row))
        if not taught.all() and config.distillation.replaces_rewards:
            raise UserError(
                f"distillation.teachers: no teacher has key={keys[int(taught.argmin())]}, a value of {teacher_key} in "
                "the training data; name a teacher of these rows, or set distillation_loss.use_task_rewards=true"
            )
        seen |= set(keys)
    for teacher in teachers:
        if data and teacher.key is not None and teacher.key not in seen:
            raise UserError(
                f"distillation.teachers.{teacher.name}.key={teacher.key}: no row of the training data has this value "
                f"in {teacher_key} (distillation.teacher_key); found {', '.join(sorted(seen)[:20])}"
            )


def _check_model(config: PPOConfig, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, at: str) -> None:
    """Raises UserError if the teacher's vocabulary or context does not contain the policy's samples."""
    remedy = "expected a folder of a causal language model with its tokenizer, in Hugging Face format"
    with user_error_on_failure(f"{at}.path={teacher.path!r} cannot be read", remedy):
        network = load_model_config(teacher_network(config, teacher))
        theirs = AutoTokenizer.from_pretrained(teacher.path, trust_remote_code=teacher.trust_remote_code)
    problem = f"{at}.path={teacher.path!r}: the teacher reads the policy's token ids"
    check_same_vocabulary(tokenizer, theirs, problem, "teacher", "use a teacher of the same model family")
    ours, size = (each.get_text_config().vocab_size for each in (load_model_config(config.model), network))
    if size < ours:
        raise UserError(
            f"{problem}, but has embeddings for {size} tokens, fewer than the policy's {ours}; use a teacher with at "
            "least as many"
        )
    context = longest_context(network)
    if context is not None and context < config.longest_sample:
        raise UserError(
            f"{at}.path={teacher.path!r}: it reads at most {context} tokens, fewer than data.max_prompt_length + "
            f"data.max_response_length = {config.longest_sample}; lower these, or use another teacher"
        )


def _check_server(server: TeacherServer, tokenizer: PreTrainedTokenizerBase, at: str) -> None:
    """Raises UserError if a server does not return log-probs, or if it decodes token ids to other texts."""
    ids = sorted({int(number) for number in np.linspace(0, len(tokenizer) - 1, PROBED_TOKENS)})
    where = f"{at}.url={server.teacher.url}"
    try:
        run_async(server.request(ids))
    except OtherTokens as error:
        raise UserError(f"{where}: {error}; use a teacher of the same model family") from error
    except (RemoteRewardError, ValueError) as error:
        raise UserError(
            f"{where}: expected log-probs of the prompt's tokens for a request with echo=true and logprobs=1, as vLLM "
            f"returns them; found: {error}"
        ) from error
