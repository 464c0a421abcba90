"""Generation for validation, evaluation and files of answers, and the validation metrics."""
