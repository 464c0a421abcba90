"""A run folder made by hand: a few steps, validation before and after, samples of each step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.sweeps.study import Study
from trainer.sweeps.study_spec import Search, StudySpec
from trainer.validation.sample import Sample
from trainer.validation.sample_files import SampleFiles

HOSTILE = "</script><script>document.title='owned'</script><!-- \x1b[2J\u2028 <img src=x onerror=alert(1)>"
SAMPLE = Sample(
    step=1, uid="p0", data_source="sums", input="What is 70 + 2?", output="72", gts="72", score=1.0, response_length=2,
    finish_reason="stop", policy_version=0, extra={"acc": 1.0, "pred": "72"},
    prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 70 + 2?"}],
)  # fmt: skip


def request(parent: int | None, row: int | None, text: str, added: str = "", **more: Any) -> dict[str, Any]:
    """A request as workers/agents/endpoint/trace.py records it; added: the content of the user message that it
    added."""
    messages = [{"role": "user", "content": added}] if added else []
    tokens = {"prompt_tokens": 1200, "tokens": 34, "versions": [3, 4], "finish_reason": "stop", "tool_calls": []}
    return {"parent": parent, "row": row, **tokens, "messages": messages, "text": text, "discarded": None, **more}


REQUESTS = [
    request(None, 0, "I will search.", "Plan the trip.", finish_reason="tool_calls", tool_calls=["search", "read"]),
    request(0, 0, "Two hotels.", messages=[{"role": "tool", "content": f"sunny {HOSTILE}"}]),
    request(1, 0, "The cheap one."),
    request(1, None, HOSTILE, discarded=f"retry {HOSTILE}"),
    request(None, 1, "A sub-agent's answer.", "Find a train.", versions=[4, 4]),
    request(2, 0, "Done: cheap hotel."),
]
"""An episode with a branch below request 1 and a sub-agent: 0, 1, (2, 5), (3), and 4 alone."""
CONFIG = """# a note
recipe: null                                  # default
actor:
  optim:
    lr: 0.001                                 # command line
    betas: [0.9, 0.95]                        # recipe:quickstart
trainer:
  total_training_steps: {steps}               # default
  experiment_name: "a # b"                    # command line
"""


def make_run(folder: Path, steps: int = 4, total: int | None = None, lr: float = 0.001) -> Path:
    """A run of `steps` steps; its score rises, prompt p0 is answered wrongly at first and rightly at the end. The last
    file has an episode of a program (q{steps}) beside an answer without one."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.replace("{steps}", str(total or steps)).replace("0.001", str(lr)))
    files = SampleFiles(folder, 1 << 26, print)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(steps + 1):
            data: dict[str, float | None] = {"val-core/sums/acc/mean@1": step / steps, "reward/acc/mean": None}
            if step:
                data |= {"critic/score/mean": 0.1 * step, "timing_s/gen": 1.0, "timing_s/step": 1.5, "actor/lr": 1e-6}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
            if step:
                right = float(step == steps)
                answers = [replace(SAMPLE, score=right, output=HOSTILE if step == 1 else f"answer {step}")]
                requests = REQUESTS if step == steps else []
                answers += [replace(SAMPLE, uid=f"q{step}", score=None, timed_out=True, requests=requests)]
                files.write_training(answers, step)
            files.write_validation([replace(SAMPLE, uid="v0", score=1.0, output="always")], step)
    return folder


def make_study(folder: Path, error: str = "out of memory") -> Path:
    """A sweep of four trials with two seeds: the second is best, the third was pruned, the last failed."""
    words = ["lr=0.001,0.002,0.005,0.01", "kind=a,b"]
    folder.mkdir(parents=True)
    study = Study(folder, StudySpec(words, {}, [1, 2], "val-core/sums/acc/mean@1", "max"), Search())
    study.save()
    for number, (state, value) in enumerate((("done", 0.4), ("done", 0.9), ("pruned", -9.0), ("failed", None))):
        lr = (1e-3, 2e-3, 5e-3, 1e-2)[number]
        trial = study.begin({"lr": f"{lr:g}", "kind": "a" if number < 3 else "b"})
        for place, run in enumerate(trial.runs if value is not None else []):
            make_run(run.folder, lr=lr)
            if state == "done":
                study.end(trial, run, "done", value=value + 0.02 * place - 0.01, steps=4, seconds=6.5)
            else:
                study.judge(trial, place + 1, value, prune=place == 1)
        if value is None:
            study.end(trial, trial.runs[0], "failed", error=error)
    study.write_csv()
    return folder
