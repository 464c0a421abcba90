"""Every column of a batch: its name, dimensions, dtype, meaning, and the one place that writes it.

Dimensions: B rows, P = data.max_prompt_length (left-padded), R = data.max_response_length (right-padded), E epochs;
of clips F frames, 3 colours, H x W pixels. Names are verl's, because users' own code reads them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from verl_lite.protocol import DataProto
from verl_lite.registry import did_you_mean


class Column(NamedTuple):
    """One column of a batch.

    Attributes:
        name: name of the column.
        dims: its dimensions, by the letters above.
        dtype: name of a torch dtype, or "object" for no tensor.
        meaning: the content in words.
        writer: the file that adds the column to a batch.
        absent: marks tokens without a value; None = they are 0, like padding.
        others: files that add the column instead in another trainer or mode; a recipe's own trainer may do so too.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    meaning: str
    writer: str
    absent: int | None = None
    others: tuple[str, ...] = ()

    @property
    def is_of_response(self) -> bool:
        """True if the column has one value per token of the response, (B, R, ...)."""
        return self.dims[1:2] == ("R",)


# the files that write columns
_PROMPTS = "trainer/data/prompts.py"
_DRIVER = "trainer/ray_trainer.py"
_GROUPS = "trainer/rollout/group_sources.py"
_ROLLOUT = "workers/rollout/rows.py"
_REWARD = "trainer/rewards/scores.py"
_ACTOR = "workers/roles/actor_rollout.py"
_ADVANTAGE = "trainer/ppo/advantage.py"
_EPISODES = "workers/agents/trajectories.py"
_AGENTS = (_EPISODES,)  # as `others`
_LOSS = "trainer/ppo/roles.py"
_TEACHERS = "trainer/ppo/teachers.py"
_FROZEN = "workers/roles/frozen_models.py"
_PLANNER = "verl_lite/seqlen_balance.py"
_CLIPS = "trainer/diffusion/clips/dataset.py"
_PATHS = "recipes/flow_grpo/trainer.py"
_SDE = "workers/diffusion/sde_policy.py"
_FLOW = "workers/diffusion/reward_flow_worker.py"
_AGENT_ADVANTAGE = "trainer/agentic/agentic_advantage.py"
_AGENT_TRAINER = "trainer/agentic/agent_trainer.py"

COLUMNS: tuple[Column, ...] = (
    Column("uid", ("B",), "object", "identifier of the prompt; a group's rows share it", _PROMPTS, others=_AGENTS),
    Column("data_source", ("B",), "object", "name of the dataset, which selects the reward", _PROMPTS, others=_AGENTS),
    Column("raw_prompt", ("B",), "object", "the prompt as a list of chat messages", _PROMPTS, others=_AGENTS),
    Column("reward_model", ("B",), "object", "dict with the ground_truth for the reward", _PROMPTS, others=_AGENTS),
    Column("extra_info", ("B",), "object", "dict of further dataset fields of the row", _PROMPTS, others=_AGENTS),
    Column("index", ("B",), "int64", "row number of the prompt in the dataset", _PROMPTS),
    Column("prompts", ("B", "P"), "int64", "token ids of the prompt, left-padded", _PROMPTS, others=(_ROLLOUT,)),
    Column("prompt_mask", ("B", "P"), "int64", "1 on tokens of the prompt, 0 on padding", _PROMPTS, others=_AGENTS),
    Column("multi_modal_inputs", ("B",), "object", "images as workers.policy.vision.ImageInputs, or None", _PROMPTS),
    Column("answers_per_prompt", ("B",), "int64", "number of responses to the prompt; absent = rollout.n", _PROMPTS),
    Column("sample", ("B",), "int64", "number of the response within its group, from 0", _GROUPS),
    Column("sample_id", ("B",), "object", "identifier of the row, unique within the run", _GROUPS, others=_AGENTS),
    Column("is_greedy", ("B",), "bool", "True for greedy responses that serve as baselines; absent = none", _GROUPS),
    Column("responses", ("B", "R"), "int64", "token ids of the response, right-padded", _ROLLOUT),
    Column("response_mask", ("B", "R"), "int64", "1 on tokens that the policy generated and learns from", _ROLLOUT),
    Column("input_ids", ("B", "P+R"), "int64", "token ids of the prompt and the response", _ROLLOUT),
    Column("attention_mask", ("B", "P+R"), "int64", "1 on tokens that are not padding", _ROLLOUT),
    Column("position_ids", ("B", "P+R"), "int64", "position of each token in its sequence, from 0", _ROLLOUT),
    Column("rollout_log_probs", ("B", "R"), "float32", "log-probs of sampled tokens, by the rollout engine", _ROLLOUT),
    Column("routed_experts", ("B", "P+R", "L", "K"), "int16", "experts that the rollout selected", _ROLLOUT, absent=-1),
    Column("sampling_candidates", ("B", "R", "C"), "int32", "tokens that could be sampled, or -1", _ROLLOUT, absent=-1),
    Column("rollout_versions", ("B", "R"), "int32", "weight update whose policy sampled the token; else -1", _ROLLOUT),
    Column("policy_version", ("B",), "int64", "the smallest rollout_versions of the response", _ROLLOUT),
    Column("finish_reason", ("B",), "object", "reason for the end of the response: stop, length or abort", _ROLLOUT),
    Column("token_level_scores", ("B", "R"), "float32", "score, on each turn's last token", _REWARD, others=_AGENTS),
    Column("outcomes", ("B",), "float32", "score before the overlong penalty; absent = no penalty", _REWARD),
    Column("rm_scores", ("B",), "float32", "score of the reward model, before its weight", _FROZEN),
    Column("reward_failed", ("B",), "object", "True where the reward returned no number", _REWARD, others=_AGENTS),
    Column("reward_timed_out", ("B",), "object", "True where the reward function exceeded its time limit", _REWARD),
    Column("old_log_probs", ("B", "R"), "float32", "log-probs before the update", _ACTOR, others=(_DRIVER, _SDE)),
    Column("entropys", ("B", "R"), "float32", "entropy of the policy at each response token", _ACTOR),
    Column("sum_pi_squared", ("B", "R"), "float32", "sum of squared probabilities over the vocabulary", _ACTOR),
    Column("ref_log_prob", ("B", "R"), "float32", "log-probs by the reference model", _FROZEN),
    Column(
        "teacher_log_probs", ("B", "R"), "float32", "teacher's log-probs of the response", _TEACHERS, others=(_FROZEN,)
    ),
    Column(
        "teacher_topk_log_probs",
        ("B", "R", "K"),
        "float32",
        "of teacher_ids, by the teacher",
        _TEACHERS,
        others=(_FROZEN,),
    ),
    Column("teacher_ids", ("B", "R", "K"), "int32", "tokens to compare", _TEACHERS, others=(_FROZEN, _ACTOR)),
    Column("has_teacher", ("B",), "bool", "True for rows in the distillation loss", _TEACHERS),
    Column("values", ("B", "R"), "float32", "expected return from each response token on", "workers/roles/critic.py"),
    Column("reward_baselines", ("B",), "float32", "score of the greedy response to the row's prompt", _REWARD),
    Column("traj_id", ("B",), "object", "identifier of the episode that contains the row", _EPISODES),
    Column("step", ("B",), "int64", "number of the row's step within its episode", _EPISODES),
    Column("state_hash", ("B",), "object", "identifier of the state at the start of the step", _EPISODES),
    Column("tags", ("B",), "object", "entry of agentic.custom_envs that configures the environment", _EPISODES),
    Column("env_ids", ("B",), "object", "number of the row's environment; absent for programs", _EPISODES),
    Column("group_ids", ("B",), "object", "number of the environment's group; absent for programs", _EPISODES),
    Column("start_step", ("B",), "int64", "training step in which the episode started", _EPISODES),
    Column("num_turns", ("B",), "int64", "number of actions in the whole episode", _EPISODES),
    Column("episode_scores", ("B",), "float32", "sum of the whole episode's rewards; 0 if it failed", _EPISODES),
    Column("step_scores", ("B",), "object", "list of each turn's reward; by steps, the step's reward", _EPISODES),
    Column("messages", ("B",), "object", "conversation of the row with its responses, as chat messages", _EPISODES),
    Column("env_metrics", ("B",), "object", "dict of the environment's metrics over the episode", _EPISODES),
    Column("stop", ("B",), "object", "reason for the end of the episode, see Trajectory.stop", _EPISODES),
    Column("env_error", ("B",), "object", "error text of a failed episode; None for others", _EPISODES),
    Column("env_timeout", ("B",), "object", "True where the environment exceeded its time limit", _EPISODES),
    Column(
        "requests",
        ("B",),
        "object",
        "program's requests, see workers/agents/endpoint/trace.py",
        _EPISODES,
    ),
    Column(
        "response_level_rewards",
        ("B",),
        "float32",
        "normalized score",
        _ADVANTAGE,
        others=(_AGENT_ADVANTAGE, _AGENT_TRAINER),
    ),
    Column("token_level_rewards", ("B", "R"), "float32", "response rewards on tokens, less the KL penalty", _ADVANTAGE),
    Column(
        "raw_advantages", ("B", "R"), "float32", "advantages before whitening", _ADVANTAGE, others=(_AGENT_TRAINER,)
    ),
    Column(
        "advantages",
        ("B", "R"),
        "float32",
        "advantages that the policy loss reads",
        _ADVANTAGE,
        others=(_AGENT_TRAINER,),
    ),
    Column("returns", ("B", "R"), "float32", "targets of the critic", _ADVANTAGE, others=(_AGENT_TRAINER,)),
    Column("selected", ("B", "R"), "bool", "True for tokens that the policy loss treats specially", _LOSS),
    Column("staleness", ("B", "R"), "int32", "weight updates since the token was sampled", _LOSS),
    Column("scores", ("B",), "float32", "outcome score of the response, for losses that read it", _LOSS),
    Column("rollout_is_weights", ("B", "R"), "float32", "importance weights from the rollout correction", _DRIVER),
    Column("is_padding", ("B",), "bool", "True for rows that only pad the batch; absent = none", _PLANNER),
    Column("mini_batch", ("B", "E"), "int64", "number of the row's optimizer step, by epoch", _PLANNER),
    Column("micro_batch", ("B", "E"), "int64", "number of the row's forward pass in its mini-batch", _PLANNER),
    Column("video", ("B", "F", "3", "H", "W"), "float32", "frames of the row's clip, in [0, 1]", _CLIPS),
    Column("prompt", ("B",), "object", "text condition of the clip, in addition to its first frame", _CLIPS),
    Column("noise_seed", ("B",), "int64", "seed of the noise that the clip is generated from", _CLIPS, others=(_FLOW,)),
    Column("row", ("B",), "int64", "row number of the clip in the dataset", _CLIPS, others=(_FLOW,)),
    Column("first_seed", ("B",), "int64", "seed of the noise at the start of a denoising path", _PATHS),
    Column("path_seed", ("B",), "int64", "seed of the noise added during denoising", _PATHS),
    Column("latents", ("B", "R+1", "..."), "float32", "denoising path of R steps from noise to data", _SDE),
    Column("frames", ("B", "..."), "float32", "generated image or frames, in [0, 1]", _FLOW, others=(_SDE,)),
    Column("face_score", ("B",), "float32", "score of the generated frames; 0 or NaN without a face", _FLOW),
    Column("counted", ("B",), "float32", "1 if the frames have a score, else 0", _FLOW),
)

SAMPLING_CANDIDATES = "sampling_candidates"
_BY_NAME = {entry.name: entry for entry in COLUMNS}
_EXTRA_PREFIX = "reward/"


def column(name: str) -> Column:
    """Returns the entry of a column.

    `reward/<name>` is a value that the reward function returned in addition to its score. With a reward model,
    `reward/model` and `reward/function` are the parts of the score, each before its weight.

    Raises:
        ValueError: the name is not a column; the message has the nearest one.
    """
    if name.startswith(_EXTRA_PREFIX):
        # these columns depend on the user's reward, so the table cannot list them
        meaning = f"value {name.removeprefix(_EXTRA_PREFIX)!r} returned by the reward function"
        return Column(name, ("B",), "object", meaning, _REWARD)
    if name not in _BY_NAME:
        near = did_you_mean(name, _BY_NAME)
        raise ValueError(f"{name!r} is not a column of a batch{near}. verl_lite/schema.py lists them.")
    return _BY_NAME[name]


def check(data: DataProto, columns_required: Iterable[str], stage: str) -> None:
    """Raises ValueError unless `data` has these columns with the right number of dimensions, equal P and equal R.

    The message names the stage, the column and the file that should have written it.
    """
    sizes: dict[str, tuple[int, str]] = {}  # by dimension, with the first column that has it
    for name in columns_required:
        entry = column(name)
        problem = _problem(data, entry, sizes)
        if problem:
            raise ValueError(f"{stage}: column {entry.name!r} {problem}. {entry.writer} writes it.")


def _problem(data: DataProto, entry: Column, sizes: dict[str, tuple[int, str]]) -> str:
    """Returns what is wrong with a column of the batch, or an empty text. Adds its sizes to `sizes`."""
    tensor_names: list[str] = []
    if data.batch is not None:
        tensor_names = [str(name) for name in data.batch.keys()]
    if entry.name not in data:
        names = sorted([*tensor_names, *data.non_tensor_batch])
        present = ", ".join(names) or "no columns"
        return f"is missing ({entry.meaning}); the batch has {present}"
    if entry.dtype == "object" or entry.name not in tensor_names:
        return ""

    shape = tuple(data.batch[entry.name].shape)
    # "..." stands for any number of further dimensions
    named_dims = [dim for dim in entry.dims if dim != "..."]
    allows_more = len(named_dims) < len(entry.dims)
    has_too_few = len(shape) < len(named_dims)
    has_too_many = len(shape) > len(named_dims) and not allows_more
    if has_too_few or has_too_many:
        return f"has shape {shape}, expected ({', '.join(entry.dims)})"

    # the first column with a dimension sets the size that later columns must have
    for dim, size in zip(named_dims, shape, strict=False):
        expected, other = sizes.setdefault(dim, (size, entry.name))
        if size != expected:
            return f"has shape {shape}, so {dim} = {size}, but {other!r} has {dim} = {expected}"
    return ""
