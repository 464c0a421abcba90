"""Generates the teacher's data: the quickstart's questions, with demonstrations that contain no errors."""

from pathlib import Path

from recipes.quickstart import data


def write_data(folder: Path, seed: int) -> None:
    """Writes the files of the quickstart into `folder`, with the right answer to every demonstrated question."""
    data.write_data(folder, seed, wrong_share=0.0)
