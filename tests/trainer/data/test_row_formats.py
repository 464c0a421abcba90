"""Rows of other schemas: which column is which, how texts become chats, which answer is the right one, and what is said
about rows that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.prompt_rows import TOOL_TEMPLATE, char_tokenizer, contents, load, make_row, truths, write
from verl_lite.errors import UserError

SIMPLE = {"prompt": "question", "ground_truth": "answer"}
LABELLED = {"prompt": "messages", "ground_truth": "label"}
USER = {"role": "user", "content": "1"}
ANSWER = {"role": "assistant", "content": "2"}
ADD = {"name": "a", "parameters": {}}


def place(tmp_path: Path, *rows: dict[str, Any], name: str = "d.jsonl") -> str:
    return write(tmp_path / name, list(rows))


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_question_and_answer(tmp_path: Path, name: str) -> None:
    file = place(tmp_path, {"question": "1+1", "answer": "2"}, {"question": "3", "answer": "3"}, name=name)
    data = load(file, columns=SIMPLE, data_source="sums")
    assert data.row(0) == {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {},
        "tools": None,
        "n": None,
        "images": [],
    }
    batch = data.__getitems__([1, 0])
    assert batch.non_tensor_batch["raw_prompt"][0] == [{"role": "user", "content": "3"}]
    assert [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]] == ["3", "2"]


@pytest.mark.parametrize(
    ("chat", "said", "truth"),
    [
        ([USER, ANSWER], "1", "2"),
        ([USER, ANSWER, USER], "121", "gold"),  # it ends with the user's turn: nothing is taken off
        ([USER, ANSWER, USER, {"role": "assistant", "content": "3"}], "121", "3"),
    ],
)
def test_messages_whose_last_answer_is_the_reference(tmp_path: Path, chat: list, said: str, truth: str) -> None:
    row = {"messages": chat} | ({"ground_truth": "gold"} if truth == "gold" else {})
    data = load(place(tmp_path, row), columns={"prompt": "messages"}, data_source="chat")
    assert (contents(data), truths(data)) == ([said], [truth])
    own = load(place(tmp_path, {**row, "label": "7"}), columns=LABELLED, data_source="chat")
    assert truths(own) == ["7"], "a ground truth of its own wins over the last answer"


def test_several_schemas_in_one_list_and_columns_inside_columns(tmp_path: Path) -> None:
    first = place(tmp_path, {"question": "1", "answer": "2", "data_source": "a"})
    second = place(tmp_path, {"problem": "3", "meta": {"final": "4", "level": 5}, "data_source": "b"}, name="e.jsonl")
    columns = {"prompt": ["question", "problem"], "ground_truth": ["answer", "meta.final"], "extra_info": "meta"}
    data = load([first, second], columns=columns)
    assert (contents(data), truths(data)) == (["1", "3"], ["2", "4"])
    assert [data.row(n)["extra_info"] for n in range(2)] == [{}, {"final": "4", "level": 5}]


def test_the_template_stands_around_texts_and_braces_in_it_are_its_own(tmp_path: Path) -> None:
    file = place(tmp_path, {"prompt": "1", "ground_truth": "2"}, {"prompt": [USER], "ground_truth": "2"})
    data = load(file, prompt_template=r"a{prompt}b \boxed{}", data_source="a")
    assert contents(data) == [r"a1b \boxed{}", "1"]  # a chat is left as it is


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize("own", [{"chat_template_kwargs": {"mark": True}}, {"enable_thinking": True}])
def test_arguments_of_the_template_that_only_some_rows_have_are_refused(
    tmp_path: Path, name: str, own: dict[str, Any]
) -> None:
    file = place(tmp_path, make_row("1", **own), make_row("2"), name=name)
    column = next(iter(own))
    argument = next(iter(own.get("chat_template_kwargs", own)))
    with pytest.raises(UserError, match=rf"row 0 of .*the row has the argument {argument}=True of the chat template"):
        load(file)
    same = load(file, apply_chat_template_kwargs={argument: True})
    assert contents(same) == ["1", "2"]
    mapped = load(file, columns={"extra_info": [column]})
    assert contents(mapped) == ["1", "2"], "the user has given the column a meaning"


def test_the_system_prompt_stands_before_chats_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "9"}, USER]
    data = load(place(tmp_path, make_row("1"), make_row("", prompt=own)), system_prompt="0")
    assert contents(data) == ["01", "91"]
    assert data[0].non_tensor_batch["raw_prompt"][0][0] == {"role": "system", "content": "0"}
    assert char_tokenizer().decode(data[0].batch["prompts"][0], skip_special_tokens=True) == "01="


@pytest.mark.parametrize(
    ("text", "pattern", "truth"),
    [
        ("48/2 = 24 #### 24\n#### 1,072", "#### (-?[0-9.,]+)", "1,072"),  # the last one
        (r"so \boxed{7}", r"#### (.+)|\\boxed\{(.+)\}", "7"),  # the group that took part
    ],
)
def test_the_ground_truth_is_found_in_a_text(tmp_path: Path, text: str, pattern: str, truth: str) -> None:
    file = place(tmp_path, make_row("1", reward_model={"ground_truth": text, "style": "rule"}))
    data = load(file, ground_truth_regex=pattern)
    assert data.row(0)["reward_model"] == {"ground_truth": truth, "style": "rule"}


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [[{"name": "b"}], json.dumps([{"name": "b"}])])
def test_tools_are_shown_by_the_template_a_rows_own_before_those_of_all(tmp_path: Path, own: Any) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([ADD, {"name": "c"}]))
    file = place(tmp_path, make_row("1"), make_row("2", tools=own), make_row("3"))
    data = load(file, template=TOOL_TEMPLATE, tools_path=str(tmp_path / "tools.json"))
    shown = char_tokenizer().batch_decode([data[n].batch["prompts"][0] for n in range(3)], skip_special_tokens=True)
    assert shown == ["a!c!1=", "b!2=", "a!c!3="]
    assert [len(data.row(n)["tools"] or []) for n in range(3)] == [2, 1, 2]


def test_tools_that_the_template_does_not_show_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not show tools .data.columns.tools=null"):
        load(place(tmp_path, make_row("1", tools=[ADD])))
    assert contents(load(place(tmp_path, make_row("1", tools=[ADD])), columns={"tools": None})) == ["1"]


def test_a_system_prompt_that_the_template_does_not_show_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}="
    with pytest.raises(UserError, match="does not show data.system_prompt='0' .*prompt_template"):
        load(place(tmp_path, make_row("1")), template=template, system_prompt="0")


@pytest.mark.parametrize("text", ["{}", "[1]", "[", "[]"])
def test_files_that_are_no_list_of_tools_are_explained(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(UserError, match="data.tools_path=.*expected a list of tool schemas"):
        load(place(tmp_path, make_row("1")), tools_path=str(tmp_path / "tools.json"))
    with pytest.raises(UserError, match="row 0 of .*'tools'.*expected a list of tool schemas"):
        load(place(tmp_path, make_row("1", tools=text)), template=TOOL_TEMPLATE)


# --- how many answers ------------------------------------------------------------------------------------------------


def test_answers_by_row_by_source_and_by_rollout(tmp_path: Path) -> None:
    rows = [make_row("1", n=3), make_row("2", data_source="b", n=None), make_row("3", data_source="c", n=None)]
    data = load(place(tmp_path, *rows), answers=8, sources={"b": {"n": 5}})
    assert data.__getitems__([2, 0, 1]).batch["answers_per_prompt"].tolist() == [8, 3, 5]
    assert "answers_per_prompt" not in load(place(tmp_path, make_row("1", n=8)), answers=8)[0]
    assert "answers_per_prompt" not in load(place(tmp_path, make_row("1", n=3)), "val")[0]


@pytest.mark.parametrize("wrong", [0, -1, "four", 2.5, True])
def test_a_number_of_answers_that_is_none_is_explained(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UserError, match="row 0 of .*column 'n': found .*at least 1.*data.columns.n=null"):
        load(place(tmp_path, make_row("1", n=wrong)))
    assert load(place(tmp_path, make_row("1", n=wrong)), columns={"n": None}).row(0)["n"] is None


# --- what is wrong, and what to give instead -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ({"question": "1", "answer": "2"}, {}, "no prompt .*columns found: answer, question.*data.columns='{prompt: q"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "2"}}, {}, "no data_source .*data.data_source=NAME"),
        ({"question": "1", "answer": None}, SIMPLE, "row 0 of .*no ground_truth .column 'answer'"),
        ({"question": None, "answer": "1"}, SIMPLE, "column 'question': found None, expected a list of chat"),
        ({"question": '[{"role": "user", "content": "1"}]', "answer": "1"}, SIMPLE, "not messages written as text"),
        ({"question": "[{'content': '1', 'role': 'user'}]", "answer": "1"}, SIMPLE, "not messages written as text"),
        # the column with the wrong value, which is not the first of the two
        ({"question": None, "m": 5, "answer": "1"}, SIMPLE | {"prompt": ["question", "m"]}, "column 'm': found 5"),
        ({"m": [ANSWER], "data_source": "a"}, {"prompt": "m"}, "only an assistant message.*a prompt before it"),
        ({"m": [USER], "data_source": "a"}, {"prompt": "m"}, "no ground_truth .*columns found: data_source, m"),
        (make_row("1"), {"extra_info": "x"}, "data.columns.extra_info=x: .*no column 'x'.*found: data_source"),
        (make_row("1"), {"data_source": "prompt"}, "column 'prompt': found .* expected a name"),
    ],
)
def test_columns_that_do_not_fit_are_explained(tmp_path: Path, row: dict, config: dict, message: str) -> None:
    source = {"data_source": "a"} if "question" in row and config else {}
    with pytest.raises(UserError, match=message):
        load(place(tmp_path, row), columns=config, **source)


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        (make_row("1"), {"ground_truth_regex": "#### (.+)"}, "found '1', .* which data.ground_truth_regex"),
        (make_row("1", reward_model={"ground_truth": 5}), {"ground_truth_regex": "(.)"}, "found 5, expected text"),
        (make_row("1"), {"sources": {"math": {"n": 2}}}, "data.sources.math: .*has no row of that.*verl_lite/sort"),
    ],
)
def test_settings_that_do_not_fit_are_explained(tmp_path: Path, row: dict, config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(place(tmp_path, row), **config)
