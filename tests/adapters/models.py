"""Tiny random models whose weights are large enough for a mistake to reach the logits."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
       "shared_expert_intermediate_size": 32}  # fmt: skip
FAMILIES = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", MOE),
    "qwen3_next": ("qwen3_next", MOE),
}


def tiny(family: str, device="cpu", dtype=torch.float32, seed: int = 0):
    model_type, extra = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SIZES | extra))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(std=0.5 if "conv1d" in name else 0.15)
    return model.to(device=device, dtype=dtype)


def prompt(batch: int, length: int, device="cpu", seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=g).to(device)


def conv_states(cache) -> list[torch.Tensor]:
    return [layer.conv_states[0] for layer in cache.layers if getattr(layer, "conv_states", None)]
