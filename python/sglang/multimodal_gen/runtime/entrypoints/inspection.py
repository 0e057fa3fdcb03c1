"""What `sglang verify` and `sglang bench` share: a run's settings, and its result as JSON."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser, values_of
from sglang.multimodal_gen.runtime.entrypoints.image_files import check_output_file, write_file

STDOUT = Path("-")


def add_json_flag(parser: FlagParser, help_text: str) -> None:
    """The flag --json FILE; with "-" or without a file the JSON is all that is printed."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        default=None,
        const=STDOUT,
        metavar="FILE",
        help=f"{help_text}; without FILE: print that alone",
    )


def checked_settings(
    given: argparse.Namespace, request_defaults: Mapping[str, Any]
) -> tuple[ServerArgs, dict[str, Any]]:
    """The process's settings and the request's keywords. Raises InvalidParameter for a bad flag,
    and for a --json file that could not be written, before any model work."""
    args = ServerArgs.from_kwargs(**values_of(given, ServerArgs))
    request = dict(request_defaults) | values_of(given, SamplingParams)
    SamplingParams.from_kwargs(**request)
    if given.json not in (None, STDOUT):
        check_output_file("json", given.json)
    return args, request


def show_result(path: Path | None, content: Any, show: Callable[[], None]) -> None:
    """`show()`, and the file that --json asked for, if it did; or the JSON in place of both."""
    text = json.dumps(content, indent=2)
    if path == STDOUT:
        print(text)
        return
    show()
    if path is not None:
        write_file(path, f"{text}\n".encode())
