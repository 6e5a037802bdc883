"""Tiny random models whose weights are large enough for a mistake to reach the logits."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GATED_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
CONV = {"conv_L_cache": 3, "layer_types": ["conv"] * 3 + ["full_attention"]}
KIMI = LINEAR | {
    "linear_num_heads": 4, "linear_head_dim": 16, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] * 3 + ["sparse"],
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
          "mamba_expand": 2, "mamba_chunk_size": 8}  # fmt: skip
HYBRID = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4}
GLM_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
              "out_hidden_size": 64, "projection_intermediate_size": 16}  # fmt: skip

CONFIGS = {
    "qwen3_5": ("qwen3_5_text", GATED_DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", GATED_DELTA | SHARED),
    "qwen3_next": ("qwen3_next", GATED_DELTA | SHARED),
    "qwen4_exp": ("qwen4_exp_text", GATED_DELTA | SHARED | LINEAR | {
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4}),
    "olmo_hybrid": ("olmo_hybrid", GATED_DELTA | LINEAR),
    "kimi_linear": ("kimi_linear", KIMI),
    "glm5_next": ("glm5_next_text", KIMI | {
        "q_lora_rank": 16, "qk_rope_head_dim": 0, "head_dim": 0, "n_routed_experts": 4,
        "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4,
        "hc_mult": 2}),
    "bailing_hybrid": ("bailing_hybrid", KIMI | {"n_group": 2, "topk_group": 2}),
    "lfm2": ("lfm2", CONV),
    "lfm2_moe": ("lfm2_moe", CONV | EXPERTS),
    "inkling": ("inkling_text", {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "d_rel": 8, "rel_extent": 16, "sliding_window_size": 32, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 97,
        "logits_mup_width_multiplier": 1.0}),
    "mamba": ("mamba", {"state_size": 8}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "jamba": ("jamba", {"mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 3,
                        "num_experts": 2}),
    "zamba": ("zamba", HYBRID | {"mamba_d_state": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2,
                          "chunk_size": 8}),
    "bamba": ("bamba", MAMBA2 | {"attn_layer_indices": [3]}),
    "falcon_h1": ("falcon_h1", MAMBA2 | {"mamba_d_ssm": 128}),
    "granitemoehybrid": ("granitemoehybrid", MAMBA2 | {
        "layer_types": ["mamba"] * 3 + ["attention"], "num_local_experts": 2,
        "shared_intermediate_size": 32}),
    "nemotron_h": ("nemotron_h", {
        "layers_block_type": ["mamba", "mamba", "attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8, "expand": 2}),
    "zamba2": ("zamba2", HYBRID | {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16,
                                   "chunk_size": 8}),
}  # fmt: skip
# Models whose attention mixes packed rows whatever the convolution does: GLM's pools cross the
# boundaries, Granite's mask is made without positions. Packing is tested without those layers.
PACKED = {
    "glm5_next": {"layer_types": ["linear_attention"] * 4},
    "granitemoehybrid": {"layer_types": ["mamba"] * 4},
}


def tiny(family: str, device="cpu", dtype=torch.float32, seed: int = 0, **extra):
    model_type, sizes = CONFIGS[family]
    sizes = SIZES | sizes | extra
    auto = AutoModelForCausalLM
    if family == "glm5_next":
        auto = AutoModelForImageTextToText
        config = AutoConfig.for_model(
            "glm5_next", text_config=sizes, vision_config=GLM_VISION, image_token_id=101,
            video_token_id=102, video_start_token_id=103, video_end_token_id=104,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    if not (owner := type(model).__module__).startswith("transformers."):
        pytest.skip(f"{owner} has taken {family} over in transformers' auto classes")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(std=0.5 if "conv" in name and p.dim() == 3 else 0.15)
    return model.to(device=device, dtype=dtype)


@functools.lru_cache
def shared(family: str, device, packed: bool = False):
    """A model that tests must leave as they found it."""
    return tiny(family, device, **(PACKED.get(family, {}) if packed else {}))


def prompt(batch: int, length: int, device="cpu", seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=g).to(device)


def packed(lengths, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cu_seqlens, seq_idx and position_ids of one packed row."""
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    ids = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
    )
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    return cu, ids.int()[None], positions[None]


def step(model, ids, cache=None, **kwargs):
    """(logits, cache) of one forward, whatever the model calls its cache."""
    name = "cache_params" if hasattr(model, "backbone") else "past_key_values"
    out = model(ids, **({} if cache is None else {name: cache}), use_cache=True, **kwargs)
    return out.logits, out[name]


def conv_states(cache) -> list[torch.Tensor]:
    return [
        state
        for layer in cache.layers
        for state in (getattr(layer, "conv_states", None) or {}).values()
        if state is not None
    ]
