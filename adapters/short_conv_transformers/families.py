"""The model families whose blocks the adapter knows. Data only."""

from __future__ import annotations

from .spec import Family

GATED_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KIMI_DELTA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
LFM2 = {"cache": "past_key_values", "conv": "conv"}
DT = ("dt_proj",)

FAMILIES = (
    Family("qwen3_5", "Qwen3_5GatedDeltaNet", rules=GATED_DELTA),
    Family("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", rules=GATED_DELTA),
    Family("qwen3_next", "Qwen3NextGatedDeltaNet", rules=GATED_DELTA),
    Family("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", rules=GATED_DELTA),
    Family("olmo_hybrid", "OlmoHybridGatedDeltaNet", rules=GATED_DELTA, joined=True),
    Family("kimi_linear", "KimiLinearDeltaAttention", rules=KIMI_DELTA, joined=True),
    Family("glm5_next", "Glm5NextTextLinearAttention", rules=KIMI_DELTA, joined=True),
    Family("bailing_hybrid", "BailingHybridDeltaAttention", rules=KIMI_DELTA, joined=True),
    Family("lfm2", "Lfm2ShortConv", **LFM2),
    Family("lfm2_moe", "Lfm2MoeShortConv", **LFM2),
    Family("inkling", "InklingShortConvolution", cache="past_key_values", mask="conv_mask",
           carriers=("InklingDecoderLayer",)),
    Family("mamba", "MambaMixer", hooked=DT, whole=True,
           carriers=("MambaForCausalLM", "MambaModel", "MambaBlock")),
    Family("falcon_mamba", "FalconMambaMixer", hooked=DT, whole=True,
           carriers=("FalconMambaForCausalLM", "FalconMambaModel", "FalconMambaBlock")),
    Family("jamba", "JambaMambaMixer", hooked=DT, whole=True,
           carriers=("JambaMambaDecoderLayer",)),
    Family("zamba", "ZambaMambaMixer", whole=True),
    Family("mamba2", "Mamba2Mixer", whole=True, carriers=("Mamba2ForCausalLM",)),
    Family("bamba", "BambaMixer", whole=True),
    Family("falcon_h1", "FalconH1Mixer", whole=True),
    Family("granitemoehybrid", "GraniteMoeHybridMambaLayer", whole=True),
    Family("nemotron_h", "NemotronHMamba2Mixer", whole=True),
    Family("zamba2", "Zamba2MambaMixer", whole=True),
)  # fmt: skip

BY_BLOCK = {family.key: family for family in FAMILIES}
if len(BY_BLOCK) != len(FAMILIES):
    raise ValueError("two families name the same block")
CARRIERS = {(family.modeling, name) for family in FAMILIES for name in family.carriers}
