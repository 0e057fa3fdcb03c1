"""`python -m sglang.multimodal_gen.runtime.launch_server`: another name of `sglang serve`."""

import sys

from sglang import cli


def main() -> int:
    """Serve as the flags of this process ask; returns the exit status."""
    return cli.main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
