"""Makes the log lines of libraries safe to print: they contain texts of a model's folder, such as its model_type."""

import logging

from transformers.utils import logging as transformers_logging

from verl_lite.errors import printable

LIBRARIES = ("transformers", "huggingface_hub", "peft", "tokenizers", "safetensors", "accelerate")


class _Printable(logging.Filter):
    """Replaces control characters in a record, so that a line cannot control the terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable(record.getMessage())
        record.args = None
        return True


def clean_library_logs() -> None:
    """Lets the handlers of the libraries that read model folders replace control characters. Called twice, it has no
    further effect."""
    transformers_logging.get_logger()  # creates transformers' handler
    # filters of handlers and not of loggers, because a logger's filter does not see the records of its children
    for name in LIBRARIES:
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(existing, _Printable) for existing in handler.filters):
                handler.addFilter(_Printable())
