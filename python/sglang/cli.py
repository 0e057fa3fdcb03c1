"""The `sglang` command: picks the entrypoint, nothing else."""

import sys
from collections.abc import Sequence
from importlib import import_module

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.validation import suggestion

# command -> (module with run(words) -> exit status, line of help)
_ENTRYPOINTS = "sglang.multimodal_gen.runtime.entrypoints"
COMMANDS = {
    "generate": (f"{_ENTRYPOINTS}.generate_command", "make pictures from text"),
    "serve": (f"{_ENTRYPOINTS}.serve_command", "serve a model as the OpenAI images API"),
    "verify": (f"{_ENTRYPOINTS}.verify_command", "compare every fused site with its eager chain"),
    "bench": (f"{_ENTRYPOINTS}.bench_command", "measure seconds a picture"),
    "version": (f"{_ENTRYPOINTS}.version_command", "print versions of package, torch, GPU"),
}
INTERRUPTED = 130  # what shells expect after Ctrl-C


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failure, 2 for bad input, 130."""
    environ.let_openmp_threads_sleep()
    name, *rest = (sys.argv[1:] if words is None else list(words)) or [""]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        unknown = f"unknown command {name[:80]!r}; {suggestion(name, COMMANDS)}"
        problem = unknown if name else "a command is missing"
        print(_usage(), f"sglang: error: {problem}", sep="\n", file=sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[name][0]).run(rest)
    except KeyboardInterrupt:
        print(f"sglang {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _usage() -> str:
    lines = [f"  {name:<10}{help_text}" for name, (_, help_text) in COMMANDS.items()]
    return "\n".join(["usage: sglang COMMAND [--flag VALUE ...]", *lines, "", _HINT])


_HINT = "sglang COMMAND --help lists the flags of a command."

if __name__ == "__main__":
    sys.exit(main())
