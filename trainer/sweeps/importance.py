"""Which parameters decide how well a trial does, by Optuna's PED-ANOVA (2304.10255), and what that rests on.

PED-ANOVA asks how far the values of the best trials lie apart from those of all. It needs nothing besides Optuna;
fANOVA, the other usual one, needs scikit-learn, and one report should not say two things on two machines.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.sweeps.study import Study, StudyRecord

if TYPE_CHECKING:
    from optuna.study import Study as OptunaStudy

_FEWEST_TRIALS = 4
_FEWEST_BEST = 5
"""Of trials that count as the best, where half of all are not fewer (Optuna's advice)."""
_ENOUGH = 50


@dataclass(frozen=True)
class Importance:
    """shares: of each parameter that varied, the largest first, 1 together; empty if nothing can be said. note: why
    not, or what it rests on."""

    shares: dict[str, float]
    note: str


def importance_of(record: StudyRecord) -> Importance:
    """Of the parameters of a study."""
    from trainer.sweeps.engine import Engine

    finished = record.finished()
    names = [parameter.name for parameter in record.question.space.parameters]
    varied = [name for name in names if len({trial.parameters.get(name) for trial in finished}) > 1]
    if len(finished) < _FEWEST_TRIALS:
        return Importance({}, f"{len(finished)} trials are complete; with fewer than {_FEWEST_TRIALS} nothing is said.")
    if len(varied) < 2:
        one = f"only {varied[0]} did" if varied else "none did"
        return Importance({}, f"There is something to compare when two parameters vary; {one}.")
    if len({trial.value for trial in finished}) == 1:
        return Importance({}, "All trials have the same value.")
    best = min(len(finished), max(math.ceil(0.1 * len(finished)), min(_FEWEST_BEST, len(finished) // 2)))
    shares = ped_anova(Engine(Study.load(record.folder)).optuna, varied, best / len(finished))
    if not sum(shares.values()):
        return Importance({}, "The best trials have the same values as the others.")
    note = f"PED-ANOVA: what the best {best} of {len(finished)} complete trials have in common."
    if len(finished) < _ENOUGH:
        note += " With so few it is a hint: single trials change the order."
    return Importance(shares, note)


def ped_anova(study: OptunaStudy, names: list[str], best: float) -> dict[str, float]:
    """Shares by parameter, the largest first. best: the share of trials that count as good."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    known = inspect.signature(PedAnovaImportanceEvaluator).parameters
    quantile = "target_quantile" if "target_quantile" in known else "baseline_quantile"  # its name until Optuna 4.5
    arguments: dict[str, Any] = {quantile: best}
    evaluator = PedAnovaImportanceEvaluator(**arguments)
    return get_param_importances(study, evaluator=evaluator, params=names)
