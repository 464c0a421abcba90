"""Datasets: sources of rows, their formats, tokenization, and the order of training prompts.

Read `prompts.py` first, which turns rows into the prompts of a step. `sources.py` reads files, `row_formats.py`
recognizes the formats of a row, `chats.py` checks its messages and tools, `template_checks.py` checks that a template
shows them, `order.py` draws and restores the order of an epoch, `sft_dataset.py` and `preferences.py` serve supervised
training. The guide is trainer/DATA.md.

Imports only `workers.policy` (tokenizer, templates) and `verl_lite`.
"""
