"""The module in which ROLL has its pipeline; `trainer.agentic.roll` implements it."""

from trainer.agentic.roll import AgenticPipeline, BasePipeline

__all__ = ["AgenticPipeline", "BasePipeline"]
