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
from workers.policy.vision import MULTI_MODAL_INPUTS, ImageInputs

_SUBSET_SEED = 1  # not data.seed, so that runs with different seeds validate on the same rows
_DECODED_AT_ONCE = 256  # rows whose images are decoded together while the dataset is read

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of one split, tokenized with the model's chat template and at most data.max_prompt_length long.

    The tokens of all prompts are in memory. Their other columns are read again for each batch, so that a dataset on
    disk need not fit into memory.

    Attributes:
        report: A sentence with the number of prompts and how many were dropped or cut.

    Args:
        files: The value of data.train_files or data.val_files.
        tokenizer: The policy's tokenizer, with its chat template.
        config: Section `data` of the options.
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
        self.split = split
        self._images = images
        self._image_tokens: dict[int, tuple[int, ...]] = {}  # by row, of rows with images
        self._pad_token_id = tokenizer.pad_token_id
        self._max_prompt_length = config.max_prompt_length
        max_samples = config.train_max_samples if split == "train" else config.val_max_samples

        paths: Sequence[str] = files
        if isinstance(files, str):
            paths = [files]
        self._schema = RowSchema(config, split, needs_ground_truth, images is not None)
        self._files = open_sources(paths, config, tokenizer, split=split)
        self._schema.check_columns(self._files)
        file_sizes = [len(file) for file in self._files]
        self._starts = np.cumsum([0, *file_sizes])  # number of each file's first row
        total = int(self._starts[-1])
        if total == 0:
            raise UserError(f"data.{split}_files={list(paths)}: the dataset has no rows; expected at least one")

        # the first rows for training, which the order shuffles; a random subset for validation, below
        row_count = total
        if split == "train" and max_samples >= 0:
            row_count = min(max_samples, total)
        prompts = self._read(row_count, config, answers)
        self._tokens = encode_prompts(prompts, tokenizer, config)
        self._require_shown_messages(prompts)
        # before the lengths are checked, so that an image counts with all its tokens
        if images is not None:
            for row, tokens in enumerate(self._tokens):
                tokens_per_image = self._image_tokens.get(row, ())
                self._tokens[row] = images.expand(tokens, tokens_per_image, self._describe(row))

        self._index, self.report = self._fit_to_limit(config)
        # after too long prompts are dropped, so that the number is exact
        if split == "val" and 0 < max_samples < len(self._index):
            self._index = _random_subset(self._index, max_samples)
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
        # a range accepts negative positions and raises IndexError at the end, which stops iteration
        positions = range(len(self))
        return self.__getitems__([positions[position]])

    def __getitems__(self, positions: Sequence[int]) -> DataProto:
        """Returns a batch of the prompts at these positions. PyTorch data loaders call this method by its name.

        Tensors: prompts (B, P), left-padded; prompt_mask (B, P); answers_per_prompt (B,), only if a row of the dataset
        requests another number of answers than `answers`.

        Non-tensors, each (B,): raw_prompt, data_source, reward_model, extra_info, uid and index, and multi_modal_inputs
        if a row of the dataset has images. Repeated prompts in a batch get different uids, so that the answers to each
        occurrence form their own group.
        """
        position_array = np.asarray(positions, dtype=np.int64)
        index = self._index[position_array]
        rows = self._rows(index)

        # all batches have the same width, as in verl
        width = self._max_prompt_length
        shape = (len(index), width)
        prompts = torch.full(shape, self._pad_token_id, dtype=torch.long)
        prompt_mask = torch.zeros_like(prompts)
        for line, row_number in enumerate(index):
            tokens = self._tokens[row_number].astype(np.int64)
            start = width - len(tokens)
            prompts[line, start:] = torch.from_numpy(tokens)
            prompt_mask[line, start:] = 1
        tensors = {"prompts": prompts, "prompt_mask": prompt_mask}
        if self._answers is not None:
            tensors["answers_per_prompt"] = torch.from_numpy(self._answers[index])

        columns = {
            "raw_prompt": as_column([row["prompt"] for row in rows]),
            "data_source": as_column([row["data_source"] for row in rows]),
            "reward_model": as_column([row["reward_model"] for row in rows]),
            "extra_info": as_column([row["extra_info"] for row in rows]),
            "uid": as_column(self._uids(index)),
            "index": index,
        }
        if self._images is not None and self._image_tokens:
            image_inputs = self._image_inputs(self._images, index, rows)
            columns[MULTI_MODAL_INPUTS] = as_column(image_inputs)
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def _uids(self, index: np.ndarray) -> list[str]:
        """Returns "{split}-{row}" for each row, and "{split}-{row}+{times}" for a row that occurred before."""
        occurrences: Counter[int] = Counter()
        uids = []
        for row_number in index.tolist():
            uid = f"{self.split}-{row_number}"
            if occurrences[row_number]:
                uid += f"+{occurrences[row_number]}"
            uids.append(uid)
            occurrences[row_number] += 1
        return uids

    def _image_inputs(
        self,
        processor: ImageProcessor,
        index: np.ndarray,
        rows: Sequence[PromptRow],
    ) -> list[ImageInputs | None]:
        """Returns the model's inputs for the images of each row; None for a row without images."""
        # by row number, so that a row that is repeated is processed once
        images_by_row = {}
        for row_number, row in zip(index.tolist(), rows, strict=True):
            if row["images"]:
                images_by_row[row_number] = row["images"]

        images_and_tokens = []
        for row_number, images in images_by_row.items():
            images_and_tokens.append((images, self._tokens[row_number]))
        inputs = processor.inputs(images_and_tokens)
        inputs_by_row = dict(zip(images_by_row, inputs, strict=True))
        return [inputs_by_row.get(row_number) for row_number in index.tolist()]

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """Yields all prompts once, in order, in batches of batch_size prompts (None: in a single batch)."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            positions = range(start, stop)
            yield self.__getitems__(positions)

    def row(self, position: int) -> PromptRow:
        """Returns the row of the prompt at a position, converted to a `PromptRow`."""
        index = self._index[[position]]
        [row] = self._rows(index)
        return row

    def data_sources(self) -> list[str]:
        """Returns the sorted data sources of all rows, including dropped rows."""
        return sorted(self._source_names)

    def positions_by_source(self) -> dict[str, np.ndarray]:
        """Returns the positions of each data source's prompts; sources without remaining prompts are left out."""
        source_codes = self._source_of[self._index]
        positions_by_source = {}
        for code, name in enumerate(self._source_names):
            positions = np.flatnonzero(source_codes == code)
            if len(positions):
                positions_by_source[name] = positions
        return positions_by_source

    def fingerprint(self) -> str:
        """Returns a digest of the token ids of all prompts, in order. A checkpoint contains it."""
        digest = hashlib.blake2b(digest_size=8)
        for row_number in self._index:
            digest.update(self._tokens[row_number].tobytes())
            # the separator makes tokens that move from one prompt to the next change the digest
            digest.update(b"|")
        return digest.hexdigest()

    def largest_token(self) -> int:
        """Returns the largest token id in any prompt."""
        largest_by_row = [tokens.max() for tokens in self._tokens]
        return int(max(largest_by_row))

    def _read(self, row_count: int, config: DataConfig, answers: int | None) -> list[Prompt]:
        """Reads and checks the first rows of the files, and returns their prompts.

        Sets the attributes for the data source and the requested number of answers of each row.

        Args:
            row_count: Number of rows to read, over all files.
            config: Section `data` of the options.
            answers: Default number of answers per prompt, see `PromptDataset`.

        Raises:
            UserError: If a row is unusable, or if data.sources names a source that the training files lack.
        """
        source_codes: dict[str, int] = {}
        prompts: list[Prompt] = []
        source_of_row = np.zeros(row_count, dtype=np.int32)
        answers_of_row = np.zeros(row_count, dtype=np.int64)
        for file in self._files:
            rows_of_file = min(len(file), row_count - len(prompts))
            for row, image_tokens in self._measured(file, rows_of_file):
                row_number = len(prompts)
                if image_tokens:
                    self._image_tokens[row_number] = image_tokens
                source = row["data_source"]
                next_code = len(source_codes)
                source_of_row[row_number] = source_codes.setdefault(source, next_code)
                source_options = config.sources.get(source, {})
                # the number of the row has priority, then that of its source; 0 without a default
                answers_of_row[row_number] = row["n"] or source_options.get("n") or answers or 0
                prompts.append(_prompt_of(row, has_images=bool(image_tokens)))

        unknown = sorted(config.sources.keys() - source_codes.keys())
        # validation files may lack a source that data.sources configures for training
        if unknown and self.split == "train":
            raise UserError(
                f"data.sources.{unknown[0]}: data.train_files has no row of that data source; found "
                f"{', '.join(sorted(source_codes))}"
            )
        self._source_names = list(source_codes)
        self._source_of = source_of_row
        # without own numbers of answers, batches have no such column
        self._answers: np.ndarray | None = None
        if answers is not None and (answers_of_row != answers).any():
            self._answers = answers_of_row
        return prompts

    def _measured(self, file: RowTable, row_count: int) -> Iterator[tuple[PromptRow, tuple[int, ...]]]:
        """Yields the first rows of a file, each with the number of tokens of each of its images."""
        rows = self._schema.rows(file, range(row_count))
        first_row = 0
        # in chunks, whose images are decoded in parallel without holding those of the whole file in memory
        while chunk := list(itertools.islice(rows, _DECODED_AT_ONCE)):
            stop_row = first_row + len(chunk)
            image_tokens: list[tuple[int, ...]] = [()] * len(chunk)
            if self._images is not None:
                images = [row["images"] for row in chunk]
                origins = []
                for row_number in range(first_row, stop_row):
                    origins.append(f"data.{self.split}_files: row {row_number} of {file.path}")
                image_tokens = self._images.token_counts(images, origins)
            yield from zip(chunk, image_tokens, strict=True)
            first_row = stop_row

    def _rows(self, index: np.ndarray) -> list[PromptRow]:
        """Returns the rows with these numbers, which count over all files."""
        file_of_row = np.searchsorted(self._starts, index, side="right") - 1
        row_by_number: dict[int, PromptRow] = {}
        # each file is read once, because reading many rows at once is much faster than one at a time
        for file_number in np.unique(file_of_row):
            file = self._files[file_number]
            row_numbers = index[file_of_row == file_number]
            rows_in_file = row_numbers - self._starts[file_number]
            rows = self._schema.rows(file, rows_in_file.tolist())
            for row_number, row in zip(row_numbers.tolist(), rows, strict=True):
                row_by_number[row_number] = row
        return [row_by_number[row_number] for row_number in index.tolist()]

    def _require_shown_messages(self, prompts: Sequence[Prompt]) -> None:
        """Raises UserError if all prompts have the same tokens although their messages differ.

        A template that leaves the messages out would train on answers to nothing, without any error.
        """
        first = self._tokens[0]
        if not all(np.array_equal(tokens, first) for tokens in self._tokens):
            return
        if any(prompt.messages != prompts[0].messages for prompt in prompts):
            raise UserError(
                f"data.{self.split}_files: all {len(prompts)} prompts become the same {len(first)} tokens, although "
                "their messages differ: the chat template does not show the messages (data.chat_template chooses "
                "another one), or the tokenizer has no tokens for their characters"
            )

    def _fit_to_limit(self, config: DataConfig) -> tuple[np.ndarray, str]:
        """Drops or cuts prompts that are longer than data.max_prompt_length.

        Returns:
            The numbers of the remaining rows, and the dataset's report.

        Raises:
            UserError: If a prompt has no tokens, or if prompts are too long and the options forbid both.
        """
        limit = config.max_prompt_length
        lengths = np.array([len(tokens) for tokens in self._tokens])
        shortest = lengths.min()
        longest = lengths.max()
        if shortest == 0:
            row = int(lengths.argmin())
            raise UserError(
                f"data.{self.split}_files: {self._describe(row)} has a prompt that the chat template turns into "
                "no tokens, so there is nothing to sample from; remove such rows"
            )

        index = np.arange(len(lengths))  # the numbers of the remaining rows
        overlong = np.flatnonzero(lengths > limit)
        report = f"{self.split}: {len(lengths)} prompts of {shortest} to {longest} tokens"
        if not len(overlong):
            return index, report
        # as in verl, the filter has priority over data.truncation; it must leave at least one prompt
        if config.filter_overlong_prompts and len(overlong) < len(lengths):
            index = index[lengths <= limit]
            return index, f"{report}; {len(overlong)} longer than {limit} were dropped, {len(index)} kept"
        if config.filter_overlong_prompts or config.truncation == "error":
            first = int(overlong[0])
            raise UserError(
                f"{len(overlong)} of {len(lengths)} prompts are longer than data.max_prompt_length={limit} "
                f"({self._describe(first)} has {lengths[first]} tokens, the longest {longest}). "
                f"{self._remedies(overlong, config.filter_overlong_prompts)}"
            )

        with_images = []
        without_images = []
        for row in overlong.tolist():
            if row in self._image_tokens:
                with_images.append(row)
            else:
                without_images.append(row)
        # a cut prompt would lack a part of an image
        if with_images:
            index = np.setdiff1d(index, with_images)
            report += f"; {len(with_images)} longer than {limit} have images and were dropped, {len(index)} kept"
        if not len(index):
            raise UserError(f"{report}: raise data.max_prompt_length, or lower data.max_pixels")

        if without_images:
            self._cut(without_images, limit, config.truncation)
            report += f"; {len(without_images)} longer than {limit} were cut (data.truncation={config.truncation})"
        return index, report

    def _cut(self, row_numbers: Sequence[int], limit: int, truncation: str) -> None:
        """Shortens the tokens of rows.

        Args:
            row_numbers: The rows.
            limit: Number of tokens that remain.
            truncation: The part that is removed: left, right or middle.
        """
        if truncation == "left":
            head_size = 0
        elif truncation == "right":
            head_size = limit
        else:
            head_size = limit // 2
        tail_size = limit - head_size
        for row_number in row_numbers:
            tokens = self._tokens[row_number]
            head = tokens[:head_size]
            # not tokens[-tail_size:], which would be all tokens for a size of 0
            tail = tokens[len(tokens) - tail_size :]
            self._tokens[row_number] = np.concatenate([head, tail])

    def _remedies(self, overlong: np.ndarray, filters: bool) -> str:
        """Returns the options that help against these prompts.

        Args:
            overlong: Numbers of the prompts' rows. Those with images are never cut.
            filters: True if data.filter_overlong_prompts is set, which would drop all prompts.
        """
        have_images = [row in self._image_tokens for row in overlong.tolist()]
        remedies = ["Raise it"]
        if not filters:
            remedies.append("drop such prompts with data.filter_overlong_prompts=true")
        if any(have_images):
            remedies.append("lower data.max_pixels, so that images take fewer tokens")
        if not all(have_images):
            cut = "cut prompts without images" if any(have_images) else "cut them"
            # the filter has priority over data.truncation
            unfiltered = "data.filter_overlong_prompts=false and " if filters else ""
            remedies.append(f"{cut} with {unfiltered}data.truncation=left|right|middle")

        text = f"{', '.join(remedies[:-1])} or {remedies[-1]}."
        if filters:
            text = f"All prompts would be dropped, but at least one prompt must remain. {text}"
        return text

    def _describe(self, row_number: int) -> str:
        """Names a row by its file and its number in that file."""
        file_number = int(np.searchsorted(self._starts, row_number, side="right")) - 1
        file = self._files[file_number]
        row_in_file = row_number - self._starts[file_number]
        return f"row {row_in_file} of {file.path}"


def _prompt_of(row: PromptRow, *, has_images: bool) -> Prompt:
    """Returns the chat template's input for a row."""
    messages = row["prompt"]
    if has_images:
        # templates write their image tokens for typed parts only
        messages = message_parts(messages)

    tools = None
    if row["tools"]:
        # json text, so that prompts with the same tools can be grouped by comparing it
        tools = json.dumps(row["tools"])
    return Prompt(messages, tools)


def _random_subset(index: np.ndarray, size: int) -> np.ndarray:
    """Returns `size` of the row numbers, in their order."""
    # drawn at random, because files are often sorted; with a fixed seed, so that runs can be compared
    generator = np.random.default_rng(_SUBSET_SEED)
    drawn = generator.choice(len(index), size, replace=False)
    return index[np.sort(drawn)]
