"""Generates the teacher's data: the quickstart's questions, with demonstrations that contain no errors."""

from pathlib import Path

from recipes.quickstart import data


def write_data(folder: Path, seed: int) -> None:
    """Writes the files of the quickstart into `folder`, with the right answer to every demonstrated question."""
    # the student's demonstrations have errors, so that RL has something to learn; a teacher should make none
    data.write_data(folder, seed, wrong_share=0.0)
