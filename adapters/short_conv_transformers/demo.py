"""A first look: one small Qwen3.5 with random weights, with and without the kernels.

The weights are random, so the text is noise; what counts is that both runs write the same noise,
that the report names the kernel, and what each run takes.
"""

from __future__ import annotations

import platform
import sys
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from .apply import patch
from .loader import load_kernel

PROMPT = "Hybrid language models mix attention with short convolutions. " * 8
NEW_TOKENS = 32
REPEATS = 5


def small_qwen(device: torch.device, dtype: torch.dtype):
    """Eight layers, six of them with a short convolution over 3072 channels; one token a byte."""
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=256, hidden_size=768, intermediate_size=1024,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=96,
        linear_num_value_heads=16, linear_num_key_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4,
        pad_token_id=0, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, p in model.named_parameters():
        if p.dim() >= 2:  # the default initialisation is too small for mistakes to show
            p.data.normal_(std=0.5 if "conv1d" in name else 1.5 * p.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype).requires_grad_(False)


def seconds(run, device: torch.device, repeats: int = REPEATS) -> float:
    """The best of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(model, ids, device) -> dict:
    out = model(ids, use_cache=True)
    cache, token = out.past_key_values, ids[:, -1:]
    return {
        "text": model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False),
        "logits": out.logits.float(),
        "prefill": seconds(lambda: model(ids, use_cache=True), device),
        "decode": seconds(lambda: model(token, past_key_values=cache), device, 4 * REPEATS),
    }


def measure_convolution(model, fn, update, T: int, device) -> dict:
    """One layer's convolution alone, called as the block calls it."""
    conv = next(m for m in model.modules() if hasattr(m, "conv1d")).conv1d
    D, W = conv.in_channels, conv.kernel_size[0]
    weight = conv.weight.squeeze(1)
    x = torch.randn(1, T, D, device=device).to(weight.dtype).transpose(1, 2)
    token = x[..., :1].contiguous()
    state = torch.zeros(1, D, W, device=device, dtype=weight.dtype)
    return {
        "conv prefill": seconds(lambda: fn(x, weight, activation="silu"), device, 4 * REPEATS),
        "conv decode": seconds(
            lambda: update(token, state, weight, None, "silu"), device, 100 * REPEATS
        ),
    }


@torch.no_grad()
def main() -> None:
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = load_kernel()
    model = small_qwen(device, dtype)
    ids = torch.tensor([list(PROMPT.encode())], device=device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    console.print(
        f"kernel {kernel.__name__}\ntransformers {transformers.__version__}, torch "
        f"{torch.__version__}, {name}, {torch.get_num_threads()} threads, {dtype}"
    )
    without = measure(model, ids, device)
    T = ids.shape[1]
    modeling = sys.modules[type(model).__module__]
    without |= measure_convolution(
        model, modeling.causal_conv1d_fn, modeling.causal_conv1d_update, T, device
    )
    with patch(model, kernel, strict=True) as handle:
        after = measure(model, ids, device)
        report = handle.report()
    after |= measure_convolution(
        model, kernel.causal_conv1d_fn, kernel.causal_conv1d_update, T, device
    )

    table = Table(title=f"small Qwen3.5, random weights, prompt of {T} tokens")
    for column in ("", "transformers", "with short-conv", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    labels = {
        "prefill": "prefill, whole model",
        "conv prefill": "prefill, one convolution",
        "decode": "decode step, whole model",
        "conv decode": "decode step, one convolution",
    }
    for key, label in labels.items():
        a, b = without[key], after[key]
        table.add_row(label, f"{1e3 * a:.3f} ms", f"{1e3 * b:.3f} ms", f"{a / b:.2f}x")
    console.print(table)
    same = torch.equal(without["text"], after["text"])
    difference = (without["logits"] - after["logits"]).abs().max().item()
    largest = without["logits"].abs().max().item()
    console.print(f"generated texts equal: {same}")
    console.print(f"largest logit difference: {difference:.2e} (logits reach {largest:.1f})")
    console.print(str(report), markup=False)
    if not same and dtype == torch.float32:
        raise SystemExit("the texts differ")


if __name__ == "__main__":
    main()
