"""The place of `Sample` in earlier versions, from which callbacks and trackers of users may import it."""

from trainer.validation.sample import Sample

__all__ = ["Sample"]
