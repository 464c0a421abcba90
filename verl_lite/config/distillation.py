"""The options of on-policy distillation: the teachers, and the loss against their probabilities."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from verl_lite.config.fields import ALL_OR_SOME, NOT_NEGATIVE, POSITIVE, FreeDict, Options, Problems, opt, section
from verl_lite.registry import did_you_mean

SAMPLED = "k1"
LOSS_MODES = (SAMPLED, "forward_kl_topk", "reverse_kl_topk", "jsd_topk")


@dataclass(frozen=True)
class Teacher:
    """An entry of `distillation.teachers`.

    Without `path` and `url`, the teacher is the policy itself.

    Args:
        name: key of the entry.
        path: folder or hub name of the model.
        url: address of a server.
        model: name of the model on the server.
        api_key_env: environment variable with the server's key.
        key: the teacher scores rows with this value in the column `distillation.teacher_key`; None = all rows.
        prompt_template: text of the last user message in the teacher's prompt, see `trainer.ppo.teachers`; None = the
            student's prompt.
        trust_remote_code: True runs the Python code in the folder `path`.
    """

    name: str
    path: str | None = None
    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    key: str | None = None
    prompt_template: str | None = None
    trust_remote_code: bool = False

    @property
    def is_policy(self) -> bool:
        """True if the policy itself is the teacher."""
        return self.path is None and self.url is None


@dataclass
class DistillationLossConfig(Options):
    """The loss against the teachers; the names are verl's."""

    loss_mode: str = opt(
        SAMPLED,
        "k1 (log-ratio of the sampled token as advantage), or a divergence of the next-token distributions: "
        "forward_kl_topk | reverse_kl_topk | jsd_topk",
        LOSS_MODES,
    )
    topk: int = opt(128, "*_topk: number of tokens; the others form one bin; -1 = the whole vocabulary", ALL_OR_SOME)
    topk_source: str = opt("teacher", "*_topk: whose most probable tokens: teacher | student", ("teacher", "student"))
    distillation_loss_coef: float = opt(1.0, "weight of the distillation loss", NOT_NEGATIVE)
    use_task_rewards: bool = opt(True, "also train with the rewards; false = only with the teachers")
    use_policy_gradient: bool | None = opt(None, "null = as loss_mode requires: true for k1, false for *_topk")
    loss_max_clamp: float | None = opt(10.0, "k1: bound of |advantage|; null = none", POSITIVE)


@dataclass
class DistillationConfig(Options):
    """On-policy distillation: the policy learns on its own samples from the probabilities of teachers."""

    enabled: bool | None = opt(None, "null = if there are teachers")
    teachers: FreeDict = opt(
        {},
        "NAME: {path: FOLDER} | {url: http://.../v1, model: NAME, api_key_env: VARIABLE} | {prompt_template: TEXT} for "
        "the policy itself; also with key: VALUE of the rows, if there are several, by default NAME",
    )
    teacher_key: str = opt("data_source", "column that selects a row's teacher: data_source or extra_info.NAME")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "loss against the teachers")

    @property
    def is_active(self) -> bool:
        """True if the run has teachers."""
        return bool(self.teachers) and self.enabled is not False

    @property
    def active_loss(self) -> DistillationLossConfig | None:
        """The loss against the teachers; None if the run has no teachers."""
        if not self.is_active:
            return None
        return self.distillation_loss

    @property
    def replaces_rewards(self) -> bool:
        """True if the policy learns only from teachers."""
        return self.is_active and not self.distillation_loss.use_task_rewards

    @property
    def takes_topk(self) -> bool:
        """True if the loss compares distributions over several tokens."""
        return self.is_active and self.distillation_loss.loss_mode != SAMPLED

    @property
    def takes_student_topk(self) -> bool:
        """True if the loss compares distributions over the policy's most probable tokens."""
        return self.takes_topk and self.distillation_loss.topk_source == "student"

    def named_teachers(self) -> list[Teacher]:
        """Returns the teachers. Call it after `check`, or use `valid_teachers`."""
        if not self.is_active:
            return []
        teachers = []
        for name, entry in self.teachers.items():
            options: FreeDict = {}
            # a single teacher has all rows, whatever its name
            if len(self.teachers) > 1:
                options["key"] = name
            for key, value in entry.items():
                if not _is_ignored(key, value):
                    name_here = _NAMES.get(key, key)
                    options[name_here] = value
            teachers.append(Teacher(name, **options))
        return teachers

    def valid_teachers(self) -> list[Teacher]:
        """Returns the teachers; none if `check` finds a problem, which would prevent reading them."""
        has_problem = any(self.check())
        if has_problem:
            return []
        return self.named_teachers()

    def check(self) -> Problems:
        if not re.fullmatch(r"data_source|extra_info\.\w[\w.]*", self.teacher_key):
            yield f"distillation.teacher_key={self.teacher_key}: expected data_source or extra_info.NAME"
        if "teacher_model" in self.teachers and len(self.teachers) > 1:
            yield (
                "distillation.teachers.teacher_model next to other teachers: verl ignores this entry silently. Give it "
                "another name, or remove it"
            )

        entry_problems: list[str] = []
        for name, entry in self.teachers.items():
            entry_problems += _entry_problems(name, entry)
        yield from entry_problems
        # an entry of another form is no `Teacher`
        if entry_problems:
            return

        teachers = self.named_teachers()
        for teacher in teachers:
            yield from _teacher_problems(teacher)
        for key, number in Counter(teacher.key for teacher in teachers).items():
            if number > 1:
                yield f"distillation.teachers: {number} teachers have key={key}; give each its own value"


_NAMES = {"model_path": "path"}  # verl's names
_FIELDS = {entry.name for entry in fields(Teacher)} - {"name"}


def _is_ignored(key: str, value: object) -> bool:
    """True for null, and for verl's options of separate inference servers, which have no effect here."""
    return value is None or key in ("inference", "num_replicas")


def _entry_problems(name: str, entry: object) -> Problems:
    """Yields what is wrong with the form of an entry of `teachers`."""
    at = f"distillation.teachers.{name}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        yield f"{at}: expected a name of letters, digits, _, - and . ; set `key` to the value of the column"
    if not isinstance(entry, Mapping):
        yield f"{at}={entry}: expected entries such as {at}.path=FOLDER"
        return

    for key, value in entry.items():
        if _is_ignored(key, value):
            continue
        is_switch = key == "trust_remote_code"
        if _NAMES.get(key, key) not in _FIELDS:
            yield f"{at}.{key}={value} is not known; known: {', '.join(sorted(_FIELDS))}{did_you_mean(key, _FIELDS)}"
        elif is_switch and not isinstance(value, bool):
            yield f"{at}.{key}={value}: expected true or false"
        elif not is_switch and not isinstance(value, str):
            yield f"{at}.{key}={value}: expected text"


def _teacher_problems(teacher: Teacher) -> Problems:
    """Yields the entries of a teacher that do not fit together, and a missing environment variable."""
    at = f"distillation.teachers.{teacher.name}"
    if teacher.path and teacher.url:
        yield f"{at}: found path={teacher.path} and url={teacher.url}; a teacher has only one of them"
    if teacher.is_policy and teacher.prompt_template is None:
        yield f"{at}: without path and url the teacher is the policy itself, so prompt_template has to add information"
    if teacher.prompt_template is not None and "{prompt}" not in teacher.prompt_template:
        yield f"{at}.prompt_template={teacher.prompt_template!r}: expected a text that contains {{prompt}}"
    if teacher.url is None:
        return

    if not teacher.url.startswith(("http://", "https://")):
        yield f"{at}.url={teacher.url}: expected http://.../v1, the address of an OpenAI-compatible server"
    if teacher.model is None:
        yield f"{at}.model is not set: expected the model's name on the server at {teacher.url}"
    variable = teacher.api_key_env
    if variable and not os.environ.get(variable):
        yield f"{at}.api_key_env={variable}: this environment variable is not set"
