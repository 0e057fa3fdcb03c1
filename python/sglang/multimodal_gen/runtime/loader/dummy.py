"""Random weights and a stand-in tokenizer for `load_format="dummy"`: full sizes, no download."""

from pathlib import Path
from types import SimpleNamespace

import torch

from sglang.multimodal_gen.runtime.distributed.tensor_parallel import full_shape, local_part

DUMMY_SEED = 20261130
PAD, BOS, EOS, BYTE_OFFSET = 0, 1, 2, 3


@torch.no_grad()
def fill_random(module: torch.nn.Module, device: torch.device) -> None:
    """Fill every parameter in place, on its device, from one seeded generator.

    Matrices and biases are normal with a standard deviation of 0.02, the scale of a trained
    model; a one-dimensional `weight` is a norm's gain and stays near 1, so activations stay finite
    over dozens of blocks.
    """
    require_memory(module, device)
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, parameter in module.named_parameters():
        if parameter.shape == full_shape(parameter):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:  # cut over ranks: a slice of what one rank would draw
            full = parameter.new_empty(full_shape(parameter))
            parameter.copy_(local_part(parameter, full.normal_(0.0, 0.02, generator=generator)))
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.add_(1.0)


def require_memory(module: torch.nn.Module, device: torch.device) -> None:
    """Raise MemoryError where filling a module on the CPU would run the machine out of memory.

    Its memory is not taken until it is written, so nothing else would stop it in time.
    """
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return
    needed = sum(p.numel() * p.element_size() for p in module.parameters())
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if needed > free:
        raise MemoryError(
            f"{type(module).__name__}: random weights take {needed / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free; use a GPU, a lower precision or a smaller model"
        )


class ByteTokenizer:
    """Byte-level tokenizer with the call signature of a transformers tokenizer.

    Token id = byte + 3; 0 pads, 1 begins (only with `bos`), 2 ends.
    """

    def __init__(self, model_max_length: int, *, bos: bool, eos: int = EOS) -> None:
        self.model_max_length = model_max_length
        self._bos = [BOS] if bos else []
        self._eos = eos

    def __call__(
        self,
        prompts: list[str],
        padding: str | None = None,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        verbose: bool = True,
    ) -> SimpleNamespace:
        """Ids of each prompt; int64 [len(prompts), max_length] when tensors are asked for."""
        rows = [self._encode(p, max_length if truncation else None) for p in prompts]
        if padding == "max_length":
            rows = [row + [PAD] * (max_length - len(row)) for row in rows]
        return SimpleNamespace(input_ids=torch.tensor(rows) if return_tensors == "pt" else rows)

    def _encode(self, prompt: str, max_length: int | None) -> list[int]:
        body = [b + BYTE_OFFSET for b in prompt.encode("utf-8")]
        room = None if max_length is None else max_length - len(self._bos) - 1
        return [*self._bos, *body[:room], self._eos]
