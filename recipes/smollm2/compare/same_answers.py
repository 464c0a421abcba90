"""One training step of this library on answers and rewards that another library sampled.

    python -m recipes.smollm2.compare.same_answers ANSWERS.json key=value ...

The run samples and scores answers of its own first. Their rewards are written to RUN/own_rewards.json, and the answers
are then replaced by those of the file, on which the step trains. See `recipes.smollm2.compare`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from trainer.cli import command, leave
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from trainer.ray_trainer import RayPPOTrainer
    from verl_lite.protocol import DataProto
    from workers.rollout.rows import Response

OWN_REWARDS = "own_rewards.json"


class SampledAnswers(TypedDict):
    """Answers of another library. The answers to a question follow each other, in the order of the training data.

    Attributes:
        prompts: Token ids of the question of each answer.
        answers: Token ids of each answer.
        rewards: Reward of each answer.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards: list[float]


def same_answers_trainer(file: Path) -> type[RayPPOTrainer]:
    """Returns a trainer class that trains on the answers of a file, the JSON object `SampledAnswers`."""
    from trainer.ray_trainer import RayPPOTrainer

    sampled: SampledAnswers = json.loads(file.read_text())

    class SameAnswers(RayPPOTrainer):
        """The trainer, with the answers of a file in place of its own after they are scored."""

        def score(self, batch: DataProto) -> DataProto:
            # the rewards of own answers are compared, too: see `own_answers` in `__main__.py`
            scored = super().score(batch)
            own_rewards = scored.batch["token_level_scores"].sum(-1)
            text = json.dumps(own_rewards.tolist())
            (self.run_dir / OWN_REWARDS).write_text(text)
            return replace_answers(scored, sampled, self.tokenizer.pad_token_id)

    return SameAnswers


def replace_answers(batch: DataProto, sampled: SampledAnswers, pad_token_id: int) -> DataProto:
    """Returns a batch with other answers and rewards.

    Args:
        batch: The columns of a scored batch.
        sampled: The answers, with their prompts and rewards.
        pad_token_id: Token on padding.

    Raises:
        UserError: A question of the file has other tokens than here, or the number of answers differs.
    """
    import torch

    from workers.rollout.rows import write_rows

    num_answers = len(sampled["answers"])
    if num_answers != len(batch):
        raise UserError(f"the file has {num_answers} answers, and the step has {len(batch)}")

    # the rows of a question are not necessarily at the question's place in the file
    samples = batch.non_tensor_batch["sample"]
    answers_per_question = max(samples) + 1
    first_answers = batch.non_tensor_batch["index"] * answers_per_question
    positions = (first_answers + samples).tolist()

    prompts = batch.batch["prompts"]
    prompt_mask = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    scores = torch.zeros_like(batch.batch["token_level_scores"])
    responses = []
    for row, position in enumerate(positions):
        own_prompt = prompts[row][prompt_mask[row]].tolist()
        prompt = sampled["prompts"][position]
        if own_prompt != prompt:
            raise UserError(f"question {position}: the file has the tokens {prompt}, here {own_prompt}")
        token_ids = sampled["answers"][position]
        responses.append(_response(token_ids))
        # the reward of an answer stands at its last token
        scores[row, len(token_ids) - 1] = sampled["rewards"][position]

    width = batch.batch["responses"].shape[1]
    columns = write_rows(prompts, prompt_mask, responses, width, pad_token_id, {})
    # a new object, so that the caller's batch keeps its columns
    replaced = batch.select()
    for name, values in columns.batch.items():
        replaced.batch[name] = values
    replaced.batch["token_level_scores"] = scores
    return replaced


def _response(token_ids: list[int]) -> Response:
    """Returns a response of these tokens, all of which are trained on."""
    from workers.rollout.rows import Response

    length = len(token_ids)
    # the file has neither log-probs nor weight versions
    return Response(token_ids, [1] * length, [0.0] * length, [0] * length, "stop", {})


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.launch.ppo_job import run_ppo

    file = Path(argv[0])
    return run_ppo(argv[1:], trainer_class=same_answers_trainer(file))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
