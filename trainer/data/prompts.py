"""The prompt dataset: reads rows from files or the hub, checks and tokenizes them once, and returns batches.

`sources` opens files and datasets, `row_formats` interprets their columns, `tokens` tokenizes prompts, and `order`
defines the order of training prompts. The user's guide is trainer/DATA.md.
"""

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.images import ImageProcessor, message_parts
from trainer.data.row_formats import PromptRow, RowSchema
from trainer.data.sources import RowTable, open_sources
from trainer.data.tokens import Prompt, encode_prompts
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column
from workers.policy.vision import MULTI_MODAL_INPUTS

_SUBSET_SEED = 1
_DECODED_AT_ONCE = 256  # rows whose images are decoded together while the dataset is read

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of one split, tokenised with the model's chat template and at most data.max_prompt_length long.

    `report` is a sentence with the number of prompts and how many were dropped or cut.

    Args:
        files: The value of data.train_files or data.val_files.
        split: "train" or "val". It selects the options and begins each row's uid, "{split}-{index}", where index
            counts the rows of all files, including dropped rows.
        needs_ground_truth: True if a reward function compares answers with reward_model["ground_truth"].
        answers: Default number of answers per prompt (rollout.n), for rows without `n` whose data source has no
            data.sources.NAME.n. None ignores both settings.
        images: The image processor of a vision-language model; None for a model of text.
    Raises:
        UserError: If a file, row or prompt is unusable.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        split: str,
        needs_ground_truth: bool = True,
        answers: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self.split, self._images = split, images
        self._image_tokens: dict[int, tuple[int, ...]] = {}  # by row, of rows with images
        self._pad_token_id = tokenizer.pad_token_id
        self._max_prompt_length = config.max_prompt_length
        max_samples = config.train_max_samples if split == "train" else config.val_max_samples
        paths = [files] if isinstance(files, str) else list(files)
        self._schema = RowSchema(config, split, needs_ground_truth, images is not None)
        self._files = open_sources(paths, config, tokenizer, split=split)
        self._schema.check_columns(self._files)
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        total = int(self._starts[-1])
        if total == 0:
            raise UserError(f"data.{split}_files={paths}: the dataset has no rows; expected at least one")
        rows = total if max_samples < 0 or split == "val" else min(max_samples, total)
        prompts = self._read(rows, config, answers)
        self._tokens = encode_prompts(prompts, tokenizer, config)
        if images is not None:
            for place, tokens in enumerate(self._tokens):
                self._tokens[place] = images.expand(tokens, self._image_tokens.get(place, ()), self._describe(place))
        self._index, self.report = self._fit_to_limit(config)
        if split == "val" and 0 < max_samples < len(self._index):
            # drawn at random, because files are often sorted; with a fixed seed, so that runs can be compared
            drawn = np.random.default_rng(_SUBSET_SEED).choice(len(self._index), max_samples, replace=False)
            self._index = self._index[np.sort(drawn)]
            self.report += f"; {max_samples} of them are taken, at random (data.val_max_samples)"
        logger.info(self.report)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def has_images(self) -> bool:
        """True if a row has images, including dropped rows."""
        return bool(self._image_tokens)

    def __getitem__(self, position: int) -> DataProto:
        """Returns one prompt as a batch of one row."""
        return self.__getitems__([range(len(self))[position]])

    def __getitems__(self, positions: Sequence[int]) -> DataProto:
        """Returns a batch of the prompts at these positions. PyTorch data loaders call this method by its name.

        Tensors: prompts (B, P), left-padded; prompt_mask (B, P); answers_per_prompt (B,), only if a row of the dataset
        requests another number of answers than `answers`. Non-tensors, each (B,): raw_prompt, data_source,
        reward_model, extra_info, uid and index, and multi_modal_inputs if a row of the dataset has images. Repeated
        prompts in a batch get different uids, so that the answers to each occurrence form their own group.
        """
        index, width = self._index[np.asarray(positions, dtype=np.int64)], self._max_prompt_length
        prompts = torch.full((len(index), width), self._pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, place in enumerate(index):
            tokens = torch.from_numpy(self._tokens[place].astype(np.int64))
            prompts[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        rows: list[dict[str, Any]] = [{**row, "raw_prompt": row["prompt"]} for row in self._rows(index)]
        names = ("raw_prompt", "data_source", "reward_model", "extra_info")
        columns = {name: as_column([row[name] for row in rows]) for name in names}
        times: Counter[int] = Counter()
        uids = []
        for place in index.tolist():
            uids.append(f"{self.split}-{place}" + (f"+{times[place]}" if times[place] else ""))
            times[place] += 1
        columns |= {"uid": as_column(uids), "index": index}
        if self._images is not None and self._image_tokens:
            files = {place: row["images"] for place, row in zip(index.tolist(), rows, strict=True) if row["images"]}
            shown = self._images.inputs([(each, self._tokens[place]) for place, each in files.items()])
            inputs = dict(zip(files, shown, strict=True))
            columns[MULTI_MODAL_INPUTS] = as_column([inputs.get(place) for place in index.tolist()])
        tensors = {"prompts": prompts, "prompt_mask": mask}
        if self._answers is not None:
            tensors["answers_per_prompt"] = torch.from_numpy(self._answers[index])
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """Yields all prompts once, in order, in batches of batch_size prompts (None: in a single batch)."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            yield self.__getitems__(range(start, min(start + size, len(self))))

    def row(self, position: int) -> PromptRow:
        """Returns the row of the prompt at a position, converted to a `PromptRow`."""
        return self._rows(self._index[[position]])[0]

    def data_sources(self) -> list[str]:
        """Returns the sorted data sources of all rows, including dropped rows."""
        return sorted(self._source_names)

    def positions_by_source(self) -> dict[str, np.ndarray]:
        """Returns the positions of each data source's prompts; sources without remaining prompts are left out."""
        kept = self._source_of[self._index]
        found = {name: np.flatnonzero(kept == code) for code, name in enumerate(self._source_names)}
        return {name: places for name, places in found.items() if len(places)}

    def fingerprint(self) -> str:
        """Returns a digest of the token ids of all prompts, in order."""
        digest = hashlib.blake2b(digest_size=8)
        for place in self._index:
            digest.update(self._tokens[place].tobytes() + b"|")
        return digest.hexdigest()

    def largest_token(self) -> int:
        """Returns the largest token id in any prompt."""
        return max(int(tokens.max()) for tokens in self._tokens)

    def _read(self, rows: int, config: DataConfig, answers: int | None) -> list[Prompt]:
        """Reads and checks the first `rows` prompts; stores their data sources and requested numbers of answers."""
        codes: dict[str, int] = {}
        prompts: list[Prompt] = []
        sources = np.zeros(rows, dtype=np.int32)
        requested = np.zeros(rows, dtype=np.int64)
        for file in self._files:
            for row, counts in self._measured(file, min(len(file), rows - len(prompts))):
                source, place = row["data_source"], len(prompts)
                if counts:
                    self._image_tokens[place] = counts
                of_source = config.sources.get(source, {}).get("n")
                sources[place] = codes.setdefault(source, len(codes))
                requested[place] = row["n"] or of_source or answers or 0
                messages = message_parts(row["prompt"]) if counts else row["prompt"]
                prompts.append(Prompt(messages, json.dumps(row["tools"]) if row["tools"] else None))
        unknown = sorted(config.sources.keys() - codes.keys()) if self.split == "train" else []
        if unknown:
            raise UserError(
                f"data.sources.{unknown[0]}: data.train_files has no row of that data source; found "
                f"{', '.join(sorted(codes))}"
            )
        self._source_names, self._source_of = list(codes), sources
        self._answers = None if answers is None or (requested == answers).all() else requested
        return prompts

    def _measured(self, file: RowTable, number: int) -> Iterator[tuple[PromptRow, tuple[int, ...]]]:
        """Yields the first `number` rows of a file, each with the number of tokens of each of its images."""
        rows, read = self._schema.rows(file, range(number)), 0
        while part := list(itertools.islice(rows, _DECODED_AT_ONCE)):
            counts: list[tuple[int, ...]] = [()] * len(part)
            if self._images is not None:
                option = f"data.{self.split}_files"
                places = [f"{option}: row {read + row} of {file.path}" for row in range(len(part))]
                counts = self._images.token_counts([row["images"] for row in part], places)
            yield from zip(part, counts, strict=True)
            read += len(part)

    def _rows(self, index: np.ndarray) -> list[PromptRow]:
        rows: dict[int, PromptRow] = {}
        which = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(which):
            places = index[which == number]
            found = self._schema.rows(self._files[number], (places - self._starts[number]).tolist())
            rows |= dict(zip(places.tolist(), found, strict=True))
        return [rows[place] for place in index.tolist()]

    def _fit_to_limit(self, config: DataConfig) -> tuple[np.ndarray, str]:
        limit, lengths = config.max_prompt_length, np.array([len(tokens) for tokens in self._tokens])
        index, overlong = np.arange(len(lengths)), np.flatnonzero(lengths > limit)
        if not lengths.min():
            raise UserError(
                f"data.{self.split}_files: {self._describe(int(lengths.argmin()))} has a prompt that the chat template "
                "turns into no tokens, so there is nothing to sample from; remove such rows"
            )
        report = f"{self.split}: {len(lengths)} prompts of {lengths.min()} to {lengths.max()} tokens"
        if not len(overlong):
            return index, report
        if config.filter_overlong_prompts and len(overlong) < len(lengths):
            index = index[lengths <= limit]
            return index, f"{report}; {len(overlong)} longer than {limit} were dropped, {len(index)} kept"
        if config.filter_overlong_prompts or config.truncation == "error":
            raise UserError(
                f"{len(overlong)} of {len(lengths)} prompts are longer than data.max_prompt_length={limit} "
                f"({self._describe(int(overlong[0]))} has {lengths[overlong[0]]} tokens, the longest {lengths.max()}). "
                f"{self._remedies(overlong, config.filter_overlong_prompts)}"
            )
        cut = [place for place in overlong.tolist() if place not in self._image_tokens]
        if dropped := len(overlong) - len(cut):  # a cut prompt would lack a part of an image
            index = np.setdiff1d(index, np.setdiff1d(overlong, cut))
            report += f"; {dropped} longer than {limit} have images and were dropped, {len(index)} kept"
        if not len(index):
            raise UserError(f"{report}: raise data.max_prompt_length, or lower data.max_pixels")
        head = {"left": 0, "right": limit, "middle": limit // 2}[config.truncation]  # tokens kept from the beginning
        for place in cut:
            tokens = self._tokens[place]
            self._tokens[place] = np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])
        if cut:
            report += f"; {len(cut)} longer than {limit} were cut (data.truncation={config.truncation})"
        return index, report

    def _remedies(self, overlong: np.ndarray, filters: bool) -> str:
        """Returns the options that help against these prompts.

        Args:
            overlong: places of the prompts. Those with images are never cut.
            filters: whether data.filter_overlong_prompts is set, which would drop all prompts.
        """
        have_images = [place in self._image_tokens for place in overlong.tolist()]
        remedies = ["Raise it"]
        if not filters:
            remedies.append("drop such prompts with data.filter_overlong_prompts=true")
        if any(have_images):
            remedies.append("lower data.max_pixels, so that images take fewer tokens")
        if not all(have_images):
            cut = "cut prompts without images" if any(have_images) else "cut them"
            unfiltered = "data.filter_overlong_prompts=false and " if filters else ""
            remedies.append(f"{cut} with {unfiltered}data.truncation=left|right|middle")

        reason = "All prompts would be dropped, but at least one prompt must remain. " if filters else ""
        return f"{reason}{', '.join(remedies[:-1])} or {remedies[-1]}."

    def _describe(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"row {index - self._starts[number]} of {self._files[number].path}"
