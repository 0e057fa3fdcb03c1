"""`sglang serve`: the OpenAI images API over HTTP, in front of an engine in a worker process."""

import asyncio
import socket
from collections.abc import Sequence

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.replica_args import ReplicaArgs
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser, values_of
from sglang.multimodal_gen.runtime.entrypoints.console import configure_logging, print_error

PROG = "sglang serve"
BACKLOG = 2048  # connections that wait to be accepted
UNREAD_MS = 60_000  # that an answer may lie unread before its connection is cut


def run(words: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted.

    Returns 0 after that, 1 when the model did not load or the port is taken; exits with 2 for
    flags that are refused.
    """
    parser = build_parser()
    given = parser.parse(words)
    try:
        args = ServerArgs.from_kwargs(**values_of(given, ServerArgs))
        http_args = HttpArgs.from_kwargs(**values_of(given, HttpArgs))
        replica_args = ReplicaArgs.from_kwargs(**values_of(given, ReplicaArgs))
        listener = _listen(http_args.host, http_args.port)
        # Half a second of imports: after the flags are checked.
        from sglang.multimodal_gen.runtime.entrypoints.server_context import make_context
        from sglang.multimodal_gen.runtime.entrypoints.server_loop import serve

        context = make_context(args, http_args, replica_args)
    except ValueError as error:  # InvalidParameter, and a bad environment variable
        parser.error(str(error))
    except OSError as error:
        print_error(PROG, error)
        return 1
    configure_logging(args.log_level)
    return asyncio.run(serve(context, listener))


def build_parser() -> FlagParser:
    """The flags of `sglang serve`: the fields of HttpArgs, ReplicaArgs and ServerArgs."""
    parser = FlagParser(PROG, "Serve a model over HTTP, as the OpenAI images API. [...]: default.")
    parser.add_settings(HttpArgs, "server")
    parser.add_settings(ReplicaArgs, "replicas")
    parser.add_settings(ServerArgs, "engine")
    return parser


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sends small packets at once only where the protocol is named, as here; else each
        # answer waits 40 ms for an acknowledgement.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; its connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        advice = "choose another --host or --port"
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
    return listener
