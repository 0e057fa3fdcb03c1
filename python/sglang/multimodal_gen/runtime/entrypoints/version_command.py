"""`sglang version`: the versions that a report of a fault needs."""

import platform
from collections.abc import Sequence

from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser
from sglang.multimodal_gen.version import DISTRIBUTION, package_version


def run(words: Sequence[str]) -> int:
    """Print the versions of this package, Python, torch and CUDA, and the GPUs. Returns 0."""
    FlagParser("sglang version", "Print versions of package, torch, GPU.").parse(words)
    import torch  # 2 s: after the flags are checked

    print(f"{DISTRIBUTION} {package_version()}")
    print(f"python {platform.python_version()}")
    print(f"torch {torch.__version__}")
    print(f"cuda {torch.version.cuda or 'none'}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"gpu {', '.join(names) or 'none'}")
    return 0
