"""What `sglang verify` and `sglang bench` share: a run's settings, and its result as JSON."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser, values_of
from sglang.multimodal_gen.runtime.entrypoints.image_files import check_output_file, write_file


def add_json_flag(parser: FlagParser, help_text: str) -> None:
    """The flag --json FILE."""
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help=help_text)


def checked_settings(
    given: argparse.Namespace, request_defaults: Mapping[str, Any]
) -> tuple[ServerArgs, dict[str, Any]]:
    """The process's settings and the request's keywords. Raises InvalidParameter for a bad flag,
    and for a --json file that could not be written, before any model work."""
    args = ServerArgs.from_kwargs(**values_of(given, ServerArgs))
    request = dict(request_defaults) | values_of(given, SamplingParams)
    SamplingParams.from_kwargs(**request)
    if given.json is not None:
        check_output_file("json", given.json)
    return args, request


def write_json(path: Path | None, content: Any) -> None:
    """Write the file that --json asked for, if it did."""
    if path is not None:
        write_file(path, f"{json.dumps(content, indent=2)}\n".encode())
