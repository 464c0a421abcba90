"""Every column of a batch: its name, dimensions, dtype, meaning, and the one place that writes it.

Dimensions: B rows, P = data.max_prompt_length (left-padded), R = data.max_response_length (right-padded), E epochs;
of clips F frames, 3 colours, H x W pixels. Names are verl's, because users' own code reads them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from verl_lite.protocol import DataProto
from verl_lite.registry import did_you_mean


class Column(NamedTuple):
    """One column. dtype: a torch dtype's name, or "object" for what is not a tensor."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    meaning: str
    writer: str


_PROMPTS = "trainer/data/prompts.py"
_DRIVER = "trainer/ray_trainer.py"
_ROLLOUT = "workers/rollout/single_turn.py"
_REWARD = "trainer/rewards/scores.py"
_ACTOR = "workers/actor_rollout.py"
_ADVANTAGE = "trainer/advantage.py"
_EPISODES = "workers/rollout/trajectories.py"
_LOSS = "trainer/roles.py"
_PLANNER = "verl_lite/seqlen_balance.py"
_CLIPS = "trainer/clips/dataset.py"
_PATHS = "recipes/flow_grpo/trainer.py"
_SDE = "workers/diffusion/sde_policy.py"

COLUMNS: tuple[Column, ...] = (
    Column("uid", ("B",), "object", "the prompt's name: rows that share it are one group", _PROMPTS),
    Column("data_source", ("B",), "object", "which dataset, which says how to score", _PROMPTS),
    Column("raw_prompt", ("B",), "object", "the prompt as a list of chat messages", _PROMPTS),
    Column("reward_model", ("B",), "object", "dict with the ground_truth that the reward compares to", _PROMPTS),
    Column("extra_info", ("B",), "object", "dict of what else the dataset says about the row", _PROMPTS),
    Column("index", ("B",), "int64", "the prompt's row number in the dataset", _PROMPTS),
    Column("prompts", ("B", "P"), "int64", "token ids of the prompt, left-padded", _PROMPTS),
    Column("prompt_mask", ("B", "P"), "int64", "1 on the prompt's own tokens", _PROMPTS),
    Column("answers_per_prompt", ("B",), "int64", "answers that the row's prompt gets; absent = rollout.n", _PROMPTS),
    Column("sample", ("B",), "int64", "which of the answers to its prompt a row is, from 0", _DRIVER),
    Column("sample_id", ("B",), "object", "a name for the row that no other row of the run has", _DRIVER),
    Column("is_greedy", ("B",), "bool", "greedy answers, whose scores are baselines; absent = none", _DRIVER),
    Column("responses", ("B", "R"), "int64", "token ids of the answer, right-padded", _ROLLOUT),
    Column("response_mask", ("B", "R"), "int64", "1 where the policy acted and gradient flows", _ROLLOUT),
    Column("input_ids", ("B", "P+R"), "int64", "prompt and answer", _ROLLOUT),
    Column("attention_mask", ("B", "P+R"), "int64", "1 on tokens that are not padding", _ROLLOUT),
    Column("position_ids", ("B", "P+R"), "int64", "position of each token in its sequence, from 0", _ROLLOUT),
    Column("rollout_log_probs", ("B", "R"), "float32", "log-probs of sampled tokens, by the rollout engine", _ROLLOUT),
    Column("routed_experts", ("B", "P+R", "L", "K"), "int16", "experts of the rollout, by token and layer", _ROLLOUT),
    Column("policy_version", ("B",), "int64", "the weight update after which the answer was sampled", _ROLLOUT),
    Column("finish_reason", ("B",), "object", "stop, length or abort", _ROLLOUT),
    Column("token_level_scores", ("B", "R"), "float32", "the reward, on the last token of the answer", _REWARD),
    Column("outcomes", ("B",), "float32", "the score before the penalty of long answers; absent = the same", _REWARD),
    Column("rm_scores", ("B",), "float32", "the reward model's score, before its weight", "workers/frozen_models.py"),
    Column("reward_failed", ("B",), "object", "True where the reward function gave no number", _REWARD),
    Column("reward_timed_out", ("B",), "object", "True where that was because it took too long", _REWARD),
    Column("old_log_probs", ("B", "R"), "float32", "log-probs by the trainer before the update", _ACTOR),
    Column("entropys", ("B", "R"), "float32", "entropy of the policy at each answer token", _ACTOR),
    Column("sum_pi_squared", ("B", "R"), "float32", "sum over the vocabulary of squared probabilities", _ACTOR),
    Column("ref_log_prob", ("B", "R"), "float32", "log-probs by the reference model", "workers/frozen_models.py"),
    Column("values", ("B", "R"), "float32", "expected return from each answer token on", "workers/critic.py"),
    Column("reward_baselines", ("B",), "float32", "score of the greedy answer to the row's prompt", _REWARD),
    Column("traj_id", ("B",), "object", "the episode that a row is a step of", _EPISODES),
    Column("step", ("B",), "int64", "which step of its episode a row is", _EPISODES),
    Column("state_hash", ("B",), "object", "a name for the state that the step starts from", _EPISODES),
    Column("tags", ("B",), "object", "entry of agentic.custom_envs that the row's environment is of", _EPISODES),
    Column("env_ids", ("B",), "object", "number of the row's environment", _EPISODES),
    Column("group_ids", ("B",), "object", "number of its group of environments", _EPISODES),
    Column("start_step", ("B",), "int64", "the step at which the episode was begun", _EPISODES),
    Column("num_turns", ("B",), "int64", "actions of the whole episode", _EPISODES),
    Column("episode_scores", ("B",), "float32", "sum of the whole episode's rewards; 0 if it failed", _EPISODES),
    Column("step_scores", ("B",), "object", "list of each turn's reward; by steps, the step's reward", _EPISODES),
    Column("messages", ("B",), "object", "the row's conversation with the answers, as chat messages", _EPISODES),
    Column("env_metrics", ("B",), "object", "dict of what the environment measured over the episode", _EPISODES),
    Column("stop", ("B",), "object", "why the episode ended, see Trajectory.stop", _EPISODES),
    Column("env_error", ("B",), "object", "why an episode failed, as text; None if it did not", _EPISODES),
    Column("env_timeout", ("B",), "object", "True where the environment was too slow", _EPISODES),
    Column("response_level_rewards", ("B",), "float32", "the score of the answer, normalised and clipped", _ADVANTAGE),
    Column("token_level_rewards", ("B", "R"), "float32", "that on its tokens, less the KL penalty", _ADVANTAGE),
    Column("raw_advantages", ("B", "R"), "float32", "advantages as the estimator gives them", _ADVANTAGE),
    Column("advantages", ("B", "R"), "float32", "how much better than expected each action was", _ADVANTAGE),
    Column("returns", ("B", "R"), "float32", "what the critic learns to predict", _ADVANTAGE),
    Column("selected", ("B", "R"), "bool", "tokens that the policy loss treats differently", _LOSS),
    Column("scores", ("B",), "float32", "how good the answer is, for losses that read it", _LOSS),
    Column("rollout_is_weights", ("B", "R"), "float32", "weight of a token for having been sampled elsewhere", _DRIVER),
    Column("is_padding", ("B",), "bool", "rows that only make the batch divide; absent = none", _PLANNER),
    Column("mini_batch", ("B", "E"), "int64", "the optimizer step of each row in each epoch", _PLANNER),
    Column("micro_batch", ("B", "E"), "int64", "the forward pass within it", _PLANNER),
    Column("video", ("B", "F", "3", "H", "W"), "float32", "frames of the row's clip, in [0, 1]", _CLIPS),
    Column("prompt", ("B",), "object", "the text that a clip is generated from, beside its first frame", _CLIPS),
    Column("noise_seed", ("B",), "int64", "seed of the noise that a clip is generated from", _CLIPS),
    Column("row", ("B",), "int64", "the clip's row number in the dataset", _CLIPS),
    Column("first_seed", ("B",), "int64", "seed of the noise that a denoising path begins with", _PATHS),
    Column("path_seed", ("B",), "int64", "seed of the noise on its way", _PATHS),
    Column("latents", ("B", "R+1", "..."), "float32", "a path: R denoising steps from noise to data", _SDE),
)

_BY_NAME = {entry.name: entry for entry in COLUMNS}
_EXTRA_PREFIX = "reward/"


def column(name: str) -> Column:
    """The entry of a column. `reward/<name>` is whatever the reward function returned beside its score; with a reward
    model `reward/model` and `reward/function` are the parts of the score, each before its weight.

    Raises ValueError for a name that is not a column, with the nearest one.
    """
    if name.startswith(_EXTRA_PREFIX):
        meaning = f"{name.removeprefix(_EXTRA_PREFIX)!r} of what the reward function returned"
        return Column(name, ("B",), "object", meaning, _REWARD)
    if name not in _BY_NAME:
        near = did_you_mean(name, _BY_NAME)
        raise ValueError(f"{name!r} is not a column of a batch{near}. verl_lite/schema.py lists them.")
    return _BY_NAME[name]


def check(data: DataProto, columns_required: Iterable[str], stage: str) -> None:
    """Raises ValueError unless `data` has these columns with the right number of dimensions, equal P and equal R.

    The message names the stage, the column and the file that should have written it.
    """
    sizes: dict[str, tuple[int, str]] = {}
    tensors = {} if data.batch is None else data.batch
    for entry in map(column, columns_required):
        problem, shape = "", tuple[int, ...]()
        if entry.name not in data:
            present = ", ".join(sorted([*tensors.keys(), *data.non_tensor_batch])) or "no columns"
            problem = f"is missing ({entry.meaning}); the batch has {present}"
        elif entry.dtype != "object" and entry.name in tensors.keys():
            shape = tuple(tensors[entry.name].shape)
            if len(shape) != len(entry.dims):
                problem = f"has shape {shape}, expected ({', '.join(entry.dims)})"
        for dim, size in zip(entry.dims, shape, strict=False):
            known, other = sizes.setdefault(dim, (size, entry.name))
            if size != known and not problem:
                problem = f"has shape {shape}, so {dim} = {size}, but {other!r} has {dim} = {known}"
        if problem:
            raise ValueError(f"{stage}: column {entry.name!r} {problem}. {entry.writer} writes it.")
