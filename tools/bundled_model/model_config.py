"""The components of the bundled model: their classes, sizes and fixed settings."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from pool import TEXT_LENGTH
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

VOCABULARY = 2048
WIDTH = 128  # of both text encoders
IMAGE_SIZE = 128
LATENT_CHANNELS = 12

DEFAULTS = {
    "width": IMAGE_SIZE,
    "height": IMAGE_SIZE,
    "num_inference_steps": 20,
    "true_cfg_scale": 2.5,
    "negative_prompt": "",
    "max_sequence_length": TEXT_LENGTH,
}


def make_vae(channels: int = LATENT_CHANNELS) -> AutoencoderKL:
    """8x down; wide where it is cheap (low resolution), narrow at full size."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 80, 80),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=16,
        sample_size=IMAGE_SIZE,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def make_transformer(channels: int = LATENT_CHANNELS) -> FluxTransformer2DModel:
    """FLUX.1's architecture at 4 heads x 64; adaLN and output projections start at zero."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * channels,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if ".norm" in name and name.endswith("linear") or name == "norm_out.linear":
                nn.init.zeros_(module.weight)
    nn.init.zeros_(model.proj_out.weight)
    for part in (model.time_text_embed.timestep_embedder, model.time_text_embed.text_embedder):
        nn.init.normal_(part.linear_1.weight, std=0.02)
        nn.init.normal_(part.linear_2.weight, std=0.02)
    return model


def make_clip() -> CLIPTextModel:
    """Pooled text embedding, taken at the first end token (id 2047)."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            bos_token_id=VOCABULARY - 2,
            eos_token_id=VOCABULARY - 1,
            pad_token_id=VOCABULARY - 1,
        )
    )


def make_t5() -> T5EncoderModel:
    """Text sequence of the joint attention."""
    return T5EncoderModel(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=32,
            num_heads=4,
            d_ff=192,
            num_layers=3,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Plain flow matching: no shift."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False
    )


class TextEncoders(nn.Module):
    """Both encoders: token ids -> (pooled [B, 128], sequence [B, T5 length, 128])."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = make_clip()
        self.t5 = make_t5()

    def forward(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple:
        """Exactly what the pipeline computes: no attention masks."""
        pooled = self.clip(clip_ids).pooler_output
        return pooled, self.t5(t5_ids)[0]


def count(module: nn.Module) -> int:
    """Distinct parameters."""
    return sum(p.numel() for p in module.parameters())


if __name__ == "__main__":
    parts = {f.__name__: count(f()) for f in (make_vae, make_transformer, make_clip, make_t5)}
    print(parts, f"{2 * sum(parts.values()) / 1e6:.2f} MB in bf16")
