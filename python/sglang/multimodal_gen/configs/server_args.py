"""What one process is: which model, where it runs and how. The command line is built from it."""

from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.configs.fields import build_from_kwargs, normalise_fields, setting
from sglang.multimodal_gen.configs.model_specs import local_model_folder
from sglang.multimodal_gen.configs.rules import Choice, Flag, Folder, Integer
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected

PRECISIONS = ("fp32", "bf16", "fp16")
_PRECISION = Choice(PRECISIONS, optional=True)
COMPILING = ("enable_torch_compile", "regional_compile")
_CUDA_ONLY_BACKENDS = ("cudnn", "efficient")


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """A process's settings. None is what the help calls "default".

    Raises InvalidParameter (a ValueError) for a bad value and for two settings that contradict each
    other: an explicit one is never silently overridden.
    """

    model_path: str | None = setting(
        None, Folder(optional=True), "diffusers folder or hub id; default: bundled model"
    )
    backend: str = setting(
        "auto",
        Choice(("auto", "sglang", "diffusers")),
        "diffusers: its own pipeline; auto: for models that sglang lacks",
    )
    num_gpus: int = setting(1, Integer(1, 64), "GPUs a picture; with --device cpu: processes")
    tp_size: int | None = setting(
        None, Integer(1, 64, optional=True), "parts of heads and MLPs (FLUX.1); default: 1"
    )
    ulysses_degree: int | None = setting(
        None, Integer(1, 64, optional=True), "parts of the tokens; default: what num-gpus leaves"
    )
    enable_cfg_parallel: bool | None = setting(
        None, Flag(optional=True), "negative prompt on GPUs of its own; default: where it runs"
    )
    local_mode: bool = setting(True, Flag(), "run the engine in this process")
    load_format: str = setting(
        "auto", Choice(("auto", "dummy")), "dummy: random weights, model-path names a config"
    )
    device: str = setting("auto", Choice(("auto", "cpu", "cuda")), "auto: a GPU if there is one")
    dit_precision: str | None = setting(None, _PRECISION, "default: bf16 on cuda, fp32 on cpu")
    vae_precision: str | None = setting(None, _PRECISION, "default: bf16 on cuda, fp32 on cpu")
    text_encoder_precision: str | None = setting(
        None, _PRECISION, "default: bf16 on cuda, fp32 on cpu"
    )
    attention_backend: str = setting(
        "auto", Choice(("auto", "cudnn", "flash", "efficient", "math")), "attention kernels"
    )
    performance_mode: str = setting(
        "auto", Choice(("auto", "speed", "memory", "manual")), "what to favour"
    )
    text_encoder_cpu_offload: bool | None = setting(
        None, Flag(optional=True), "wait in host memory; default: in memory mode only"
    )
    dit_layerwise_offload: bool = setting(
        False, Flag(), "transformer in host memory, two blocks at a time on the GPU"
    )
    lora_path: str | None = setting(
        None, Folder(optional=True), "LoRA to merge: a safetensors file, or a folder with one"
    )
    enable_torch_compile: bool = setting(False, Flag(), "compile the transformer; not lossless")
    regional_compile: bool = setting(False, Flag(), "compile its blocks instead; not lossless")
    fast_paths: bool = setting(True, Flag(), "fused kernels; off: every site runs eager")
    log_level: str = setting(
        "info", Choice(("debug", "info", "warning", "error")), "least level to print"
    )

    def __post_init__(self) -> None:
        normalise_fields(self)
        if self.load_format == "dummy":
            local_model_folder(self.model_path, self.load_format)
        self._check_conflicts()

    @classmethod
    def from_kwargs(cls, **values: Any) -> "ServerArgs":
        """Settings from keywords; an unknown one is an error that names the nearest valid one."""
        return build_from_kwargs(cls, values)

    @property
    def offload_text_encoder(self) -> bool:
        """Whether text encoders wait in host memory: as asked, else in memory mode only."""
        if self.text_encoder_cpu_offload is None:
            return self.performance_mode == "memory"
        return self.text_encoder_cpu_offload

    def precision(self, component: str, device_type: str) -> str:
        """One of PRECISIONS for component "dit", "vae" or "text_encoder" on "cpu" or "cuda"."""
        asked = getattr(self, f"{component}_precision")
        return asked or ("bf16" if device_type == "cuda" else "fp32")

    def check_acts_on_diffusers(self) -> None:
        """Raise InvalidParameter for a setting that cannot act with the diffusers backend."""
        cannot = {
            "num_gpus": 1,
            "load_format": "auto",
            "attention_backend": "auto",
            "lora_path": None,
            "dit_layerwise_offload": False,
        }
        for name, only in cannot.items():
            if getattr(self, name) != only:
                raise rejected(name, getattr(self, name), f"{only!r} with the diffusers backend")
        if self.offload_text_encoder:
            saver = {"memory": "performance_mode"}.get(self.performance_mode)
            name = saver or "text_encoder_cpu_offload"
            raise rejected(name, getattr(self, name), "another one with the diffusers backend")

    def _check_conflicts(self) -> None:
        if self.backend == "diffusers":
            self.check_acts_on_diffusers()
        if not self.local_mode:
            raise rejected("local_mode", False, "True: the engine runs in this process")
        if self.lora_path is not None and self.num_gpus > 1:
            raise rejected("lora_path", self.lora_path, f"None with num_gpus={self.num_gpus}")
        for name in COMPILING:
            if getattr(self, name) and self.num_gpus > 1:
                got = f"got True with num_gpus={self.num_gpus}"
                raise InvalidParameter(name, f"{got}, expected num_gpus=1; drop one of the two")
        self._check_layerwise_offload()
        offload, mode = self.text_encoder_cpu_offload, self.performance_mode
        if (mode == "speed" and offload) or (mode == "memory" and offload is False):
            raise InvalidParameter(
                "text_encoder_cpu_offload",
                f"got {offload} with performance_mode={mode!r}, which wants the opposite; "
                "drop one of the two or use performance_mode='manual'",
            )
        if self.device == "cpu" and offload:
            raise InvalidParameter(
                "text_encoder_cpu_offload",
                "got True with device='cpu', expected device='cuda' or 'auto'; drop one of the two",
            )
        if self.device == "cpu" and self.attention_backend in _CUDA_ONLY_BACKENDS:
            raise InvalidParameter(
                "attention_backend",
                f"got {self.attention_backend!r} with device='cpu', where it does not exist; "
                "use 'auto', 'flash' or 'math'",
            )

    def _check_layerwise_offload(self) -> None:
        """A block's weights lie elsewhere at every turn, which these cannot follow."""
        if not self.dit_layerwise_offload:
            return
        wanted = {"num_gpus": 1, "lora_path": None} | dict.fromkeys(COMPILING, False)
        clashes = [name for name, only in wanted.items() if getattr(self, name) != only]
        clashes += ["device"] if self.device == "cpu" else []
        if clashes:
            got = f"got True with {clashes[0]}={getattr(self, clashes[0])!r}"
            text = f"{got}, expected another {clashes[0]}; drop one of the two"
            raise InvalidParameter("dit_layerwise_offload", text)
