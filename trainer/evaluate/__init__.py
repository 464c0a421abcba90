"""How prompts are answered for validation, evaluation and files of answers, and the numbers of it."""
