"""The prompts of a run: reads dataset files, checks them, tokenises once, and serves batches of any size.

Rows follow verl's schema (see `EXAMPLE_ROW`). What can be wrong with a dataset is found here, before anything heavy
starts, in one message that names file, row, column and remedy. Token ids live in one flat array; the other columns are
read when a batch is made.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from trainer.data_files import check_prompt, read_data_file
from verl_lite.config import DataConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column

_ENCODE_ROWS = 1000
_TRUNCATIONS = ("error", "left", "right", "middle")
_TEMPLATE_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "return_tensors", "return_dict", "padding")
"""What is asked of the chat template here, and so is not the user's to say."""

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of one split, tokenised with the model's chat template and at most data.max_prompt_length long.

    files: one path or several, parquet, json or jsonl. split: "train" or "val"; it names the option in messages, and
    the rows: a row's uid is "{split}-{index}", where index counts the rows of all files, dropped ones too.
    needs_ground_truth: whether a reward function compares answers with reward_model["ground_truth"], which each row
    then has to have.
    Raises UserError for files, rows or prompts that cannot be used. `report` says how many prompts there are and what
    was dropped or cut.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        split: str,
        needs_ground_truth: bool = True,
    ) -> None:
        self.split = split
        self._pad_token_id = tokenizer.pad_token_id
        self._max_prompt_length = config.max_prompt_length
        self._prompt_key = config.prompt_key
        max_samples = config.train_max_samples if split == "train" else config.val_max_samples
        paths = [files] if isinstance(files, str) else list(files)
        self._files = [
            read_data_file(path, f"data.{split}_files", config.prompt_key, needs_ground_truth) for path in paths
        ]
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        total = int(self._starts[-1])
        if total == 0:
            raise UserError(f"data.{split}_files={paths}: the dataset has no rows; expected at least one")
        rows = total if max_samples < 0 else min(max_samples, total)
        if rows == 0:
            raise UserError(f"data.{split}_max_samples=0 leaves no rows; -1 means all")
        self._tokens = _encode(self._prompts(rows), tokenizer, config)
        self._index, self.report = self._fit_to_limit(config)
        logger.info(self.report)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, position: int) -> DataProto:
        """One prompt, as a batch of one row."""
        return self.__getitems__([range(len(self))[position]])

    def __getitems__(self, positions: Sequence[int]) -> DataProto:
        """A batch of the prompts at these places (data loaders look for this name).

        Tensors prompts (B, P) left-padded and prompt_mask (B, P); raw_prompt, data_source, reward_model, extra_info,
        uid and index (B,).
        """
        index = self._index[np.asarray(positions, dtype=np.int64)]
        prompts = torch.full((len(index), self._max_prompt_length), self._pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, place in enumerate(index):
            tokens = torch.from_numpy(self._tokens[place].astype(np.int64))
            prompts[row, self._max_prompt_length - len(tokens) :] = tokens
            mask[row, self._max_prompt_length - len(tokens) :] = 1
        rows = self._rows(index)
        return DataProto.from_dict(
            tensors={"prompts": prompts, "prompt_mask": mask},
            non_tensors={
                "raw_prompt": as_column([row[self._prompt_key] for row in rows]),
                "data_source": as_column([row["data_source"] for row in rows]),
                "reward_model": as_column([row.get("reward_model") or {} for row in rows]),
                "extra_info": as_column([row.get("extra_info") or {} for row in rows]),
                "uid": as_column([f"{self.split}-{place}" for place in index]),
                "index": index,
            },
        )

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """All prompts once, in order; None = in one batch."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            yield self.__getitems__(range(start, min(start + size, len(self))))

    def row(self, position: int) -> dict[str, Any]:
        """A row as the file has it."""
        return self._rows(self._index[[position]])[0]

    def data_sources(self) -> list[str]:
        """Every data_source of the files."""
        return sorted({source for file in self._files for source in file.column("data_source")})

    def fingerprint(self) -> str:
        """Equal for equal prompts in equal order under an equal tokenizer and template."""
        digest = hashlib.blake2b(digest_size=8)
        for place in self._index:
            digest.update(self._tokens[place].tobytes() + b"|")
        return digest.hexdigest()

    def largest_token(self) -> int:
        """The largest token id of all prompts."""
        return max(int(tokens.max()) for tokens in self._tokens)

    def _prompts(self, rows: int) -> list[list[dict[str, str]]]:
        prompts: list[list[dict[str, str]]] = []
        for file in self._files:
            for index, prompt in enumerate(file.column(self._prompt_key)[: rows - len(prompts)]):
                check_prompt(
                    prompt, f"data.{self.split}_files: row {index} of {file.path}, column {self._prompt_key!r}"
                )
                prompts.append(prompt)
        return prompts

    def _rows(self, index: np.ndarray) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{}] * len(index)
        which = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(which):
            places = np.flatnonzero(which == number)
            found = self._files[number].rows((index[places] - self._starts[number]).tolist())
            for place, row in zip(places, found, strict=True):
                rows[place] = row
        return rows

    def _fit_to_limit(self, config: DataConfig) -> tuple[np.ndarray, str]:
        """Which rows stay, and a sentence about it; longer prompts are dropped, cut or refused."""
        if config.truncation not in _TRUNCATIONS:
            raise UserError(f"data.truncation={config.truncation!r}: expected one of {', '.join(_TRUNCATIONS)}")
        limit = config.max_prompt_length
        lengths = np.array([len(tokens) for tokens in self._tokens])
        index, overlong = np.arange(len(lengths)), np.flatnonzero(lengths > limit)
        if not lengths.min():
            raise UserError(
                f"data.{self.split}_files: {self._describe(int(lengths.argmin()))} has a prompt without any token "
                "under the chat template, and an answer has to follow something; leave such rows out"
            )
        report = f"{self.split}: {len(lengths)} prompts of {lengths.min()} to {lengths.max()} tokens"
        if not len(overlong):
            return index, report
        first = int(overlong[0])
        what = f"{len(overlong)} of {len(lengths)} prompts are longer than data.max_prompt_length={limit}"
        example = f"{self._describe(first)} has {lengths[first]} tokens, the longest {lengths.max()}"
        if config.filter_overlong_prompts:
            kept = index[lengths <= limit]
            if not len(kept):
                raise UserError(
                    f"data.filter_overlong_prompts=true leaves none of the {len(lengths)} prompts: all are longer than "
                    f"data.max_prompt_length={limit} ({example}). Raise data.max_prompt_length."
                )
            logger.warning("%s: %s and were dropped, %d are kept (%s)", self.split, what, len(kept), example)
            return kept, f"{report}; {len(overlong)} longer than {limit} were dropped, {len(kept)} kept"
        if config.truncation == "error":
            raise UserError(
                f"{what}: {example}. Raise data.max_prompt_length, drop such prompts with "
                "data.filter_overlong_prompts=true, or cut them with data.truncation=left|right|middle."
            )
        for place in overlong:
            self._tokens[place] = truncate(self._tokens[place], limit, config.truncation)
        logger.warning("%s: %s and were cut, data.truncation=%s (%s)", self.split, what, config.truncation, example)
        return index, f"{report}; {len(overlong)} longer than {limit} were cut (data.truncation={config.truncation})"

    def _describe(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"row {index - self._starts[number]} of {self._files[number].path}"


def truncate(tokens: np.ndarray, limit: int, side: str) -> np.ndarray:
    """At most `limit` tokens. side: the end that is cut off, `left` or `right`; `middle` keeps both ends."""
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    head = limit // 2
    return np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])


def _encode(
    prompts: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[np.ndarray]:
    """Token ids of each prompt, int32, with the generation prompt at the end, exactly as they will be sampled from."""
    if tokenizer.chat_template is None:
        raise UserError(
            "The tokenizer of model.path has no chat template, so chat messages cannot become a prompt. Give one that "
            "has with model.tokenizer_path, or add chat_template to its tokenizer_config.json"
        )
    kwargs = dict(config.apply_chat_template_kwargs)
    for name in (name for name in kwargs if name in _TEMPLATE_ARGUMENTS):
        raise UserError(
            f"data.apply_chat_template_kwargs.{name}={kwargs[name]!r}: it is decided by the trainer, which needs the "
            "text of one prompt with the beginning of an answer; leave it out"
        )
    chunks = [prompts[start : start + _ENCODE_ROWS] for start in range(0, len(prompts), _ENCODE_ROWS)]
    workers = min(config.filter_overlong_prompts_workers, len(chunks))
    if workers <= 1:
        encoded = [_encode_chunk(tokenizer, chunk, kwargs) for chunk in chunks]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            count = len(chunks)
            encoded = list(pool.map(_encode_chunk, [tokenizer] * count, chunks, [kwargs] * count))
    return [np.array(tokens, dtype=np.int32) for chunk in encoded for tokens in chunk]


def _encode_chunk(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[dict[str, str]]], kwargs: dict[str, Any]
) -> list[list[int]]:
    try:
        texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True, **kwargs)
    except Exception as error:  # the template is the model's code and kwargs are the user's: they may raise anything
        if len(prompts) > 1:  # which of them it was is found one by one
            return [_encode_chunk(tokenizer, [prompt], kwargs)[0] for prompt in prompts]
        given = f" with data.apply_chat_template_kwargs={kwargs}" * bool(kwargs)
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r}{given} refuses the prompt {prompts[0]!r:.200} "
            f"({type(error).__name__}: {error}). Change the prompt in the data, take another template with "
            "model.tokenizer_path, or other data.apply_chat_template_kwargs"
        ) from error
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


class EpochBatches:
    """Places of the prompts of each batch, epoch after epoch; the last batch of an epoch may be short.

    One pass of the iterator is one epoch, or the rest of it after `load_state_dict`. The order depends on (seed, epoch)
    alone. fingerprint: of the dataset; a state of another dataset is refused.
    """

    def __init__(self, rows: int, batch_size: int, *, shuffle: bool, seed: int, fingerprint: str) -> None:
        self.rows, self.batch_size, self.shuffle, self.seed = rows, batch_size, shuffle, seed
        self.fingerprint = fingerprint
        self.epoch = 0
        self.served = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.rows)
        while self.served < self.rows:
            batch = order[self.served : self.served + self.batch_size].tolist()
            self.served += len(batch)
            yield batch
        self.epoch, self.served = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "served": self.served, "dataset": [self.rows, self.fingerprint]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = [self.rows, self.fingerprint]
        if state["dataset"] != found:
            raise UserError(
                f"The training prompts are not those of the checkpoint: rows and fingerprint are {found}, those "
                f"of the checkpoint {state['dataset']}. Resume with the same data.train_files, tokenizer and template."
            )
        self.epoch, self.served = state["epoch"], state["served"]


def build_train_loader(data: PromptDataset, config: PPOConfig) -> StatefulDataLoader:
    """Training batches of data.train_batch_size prompts (`DataProto`, see `PromptDataset.__getitems__`).

    Each iteration is one epoch, shuffled anew from data.seed. `state_dict()` after a batch, loaded into a new loader,
    continues with the next one.
    """
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    batches = EpochBatches(
        len(data), config.data.train_batch_size, shuffle=config.data.shuffle, seed=seed, fingerprint=data.fingerprint()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchdata warns of its own use of a deprecated call
        return StatefulDataLoader(
            data,
            batch_sampler=batches,
            num_workers=0,
            collate_fn=_as_is,
            generator=torch.Generator(),  # its own, so that a new iterator draws nothing from the global one
        )


def _as_is(batch: DataProto) -> DataProto:
    return batch
