"""Whether text encoders live on the GPU or wait in host memory between requests."""

import torch

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader

USABLE_SHARE = 0.85  # of the free GPU memory; the rest is for activations


def offloads_text_encoders(args: ServerArgs, loader: ComponentLoader) -> bool:
    """As the flags say; `performance_mode="auto"` offloads when the weights would not fit.

    FLUX.1-dev in bf16 takes 34 GB, of which the text encoders are 10 and run once a request.
    """
    if args.performance_mode != "auto" or args.text_encoder_cpu_offload is not None:
        return args.offload_text_encoder
    if loader.device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(loader.device)
    return loader.weight_bytes() > USABLE_SHARE * free
