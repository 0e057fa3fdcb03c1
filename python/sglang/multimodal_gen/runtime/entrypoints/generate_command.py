"""`sglang generate`: everything that can be refused is refused before torch is imported."""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.model_specs import known_spec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser, values_of
from sglang.multimodal_gen.runtime.entrypoints.console import configure_logging, print_error
from sglang.multimodal_gen.runtime.entrypoints.image_files import (
    OutputError,
    check_output_file,
    check_writable_folder,
    write_file,
)

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import GenerationResult

logger = logging.getLogger(__name__)
PROG = "sglang generate"
COMMAND_DEFAULTS = {"save_output": True}  # a command without a picture on disk is of no use


@dataclass(frozen=True)
class _Job:
    request: dict[str, Any]
    server: dict[str, Any]
    log_level: str
    report: Path | None


def run(words: Sequence[str]) -> int:
    """Make the pictures that the flags ask for and print their paths.

    Returns 0, or 1 when the engine or a file failed; exits with 2 for flags that are refused.
    """
    parser = build_parser()
    given = parser.parse(words)
    try:
        job = _checked_job(given)
    except InvalidParameter as error:
        parser.error(str(error))
    configure_logging(job.log_level)
    try:
        return _run_job(job)
    except ValueError as error:  # a bad input that only the engine can see, such as a hub id
        logger.debug("refused", exc_info=True)
        print_error(PROG, error)
        return 2
    except (RuntimeError, OSError, MemoryError) as error:
        logger.debug("failed", exc_info=True)
        print_error(PROG, error)
        return 1


def build_parser() -> FlagParser:
    """The flags of `sglang generate`: the fields of SamplingParams and ServerArgs, and --report."""
    parser = FlagParser(
        PROG, "Make pictures from text. [...] is the default; without: the model's."
    )
    parser.add_settings(SamplingParams, "picture", COMMAND_DEFAULTS)
    parser.add_settings(ServerArgs, "process")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what really ran as JSON")
    return parser


def _checked_job(given: argparse.Namespace) -> _Job:
    request = COMMAND_DEFAULTS | values_of(given, SamplingParams)
    if "prompt" not in request:
        raise InvalidParameter("prompt", 'is missing; pass --prompt "a red apple"')
    server = values_of(given, ServerArgs)
    params, args = SamplingParams.from_kwargs(**request), ServerArgs.from_kwargs(**server)
    if params.save_output or params.profile:
        check_writable_folder("output_path", Path(params.output_path))
    if given.report is not None:
        check_output_file("report", given.report)
    spec = known_spec(args.model_path, args.load_format, args.backend)
    if spec is not None:
        params.fit(spec)
    return _Job(request=request, server=server, log_level=args.log_level, report=given.report)


def _run_job(job: _Job) -> int:
    error = None
    try:
        results = _generate(job)
    except OutputError as caught:
        error, results = caught, list(caught.results)
    for result in results:
        if result.output_file_path is not None:
            print(result.output_file_path)
    if job.report is not None and results:
        write_file(job.report, _report_bytes(results))
    if error is not None:
        raise error
    return 0


def _generate(job: _Job) -> "list[GenerationResult]":
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import DiffGenerator

    with DiffGenerator.from_pretrained(**job.server) as generator:
        results = generator.generate(sampling_params_kwargs=job.request)
    return results if isinstance(results, list) else [results]


def _report_bytes(results: "Sequence[GenerationResult]") -> bytes:
    reports = [result.report for result in results]
    content = reports[0] if len(reports) == 1 else {"images": reports}
    return (json.dumps(content, indent=2) + "\n").encode()
