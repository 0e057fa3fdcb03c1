"""What the commands share on a terminal: log lines on stderr, results on stdout."""

import logging
import sys


class _LevelPrefix(logging.Formatter):
    """ "warning: ..." and "error: ..."; information stands alone."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"


def configure_logging(level: str) -> None:
    """Send this package's log records from `level` ("info", ...) upwards to stderr."""
    logger = logging.getLogger("sglang")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LevelPrefix())
    logger.handlers = [handler]  # one handler however often a command runs in this process
    logger.setLevel(level.upper())
    logger.propagate = False


def print_error(prog: str, error: BaseException) -> None:
    """Print "prog: error: ..." to stderr; an error without a text shows its type."""
    print(f"{prog}: error: {str(error) or type(error).__name__}", file=sys.stderr)
