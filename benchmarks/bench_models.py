"""What the convolution is worth in a model: prefill, training step and decode with each of four.

The models are proxies: transformers' own decoder classes at the sizes of the named models, one
sequence, random weights, no embedding table worth the name and no head. A mixture of experts is
one dense MLP of the experts a token is sent to, and GLM-5-Flash keeps its 34
delta-rule layers and one of its eleven with attention.
Only the convolution changes between rows. With flash-linear-attention installed, the delta rule is
its own in all of them. A training step recomputes each layer (gradient checkpointing).

The convolution's share is the time of the same calls alone, in a replayed graph, over the model's.

The decode loop is a stack of Qwen3.5-9B's convolution layers (projection in, update, projection
out), captured as one CUDA graph, as a server runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmark_conv1d import (
    DTYPES,
    ROOT,
    Case,
    Inputs,
    Providers,
    machine,
    replay_us,
    transformers_file,
)
from kernels import get_local_kernel
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModel

from short_conv_transformers import patch

NAMES = ("transformers", "causal-conv1d", "flash-linear-attention", "short-conv")
STEPS = 16  # decode steps that are timed after each prefill
DENSE = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
# intermediate_size: the routed and shared experts of one token side by side
PROXIES = {
    "Qwen3.5-9B": ("qwen3_5_text", {}),
    "Kimi-Linear": (
        "kimi_linear",
        {"mlp_layer_types": ["dense"] * 27, "intermediate_size": 9 * 1024},
    ),
    "GLM-5-Flash-like": (
        "glm5_next_text",
        {"num_hidden_layers": 35, "intermediate_size": 9 * 2048,
         "layer_types": ["linear_attention"] * 34 + ["indexed_attention"],
         "mlp_layer_types": ["dense"] * 35},
    ),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2, "linear_num_heads": 2,
    "linear_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def build(name: str, tiny: bool, device: torch.device):
    model_type, sizes = PROXIES[name]
    transformers_file(model_type.removesuffix("_text"))
    if tiny:
        attention = sizes.get("layer_types", ["full_attention"])[-1]
        sizes = sizes | TINY | {"layer_types": ["linear_attention", attention]}
    config = AutoConfig.for_model(model_type, **(DENSE | sizes))
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.manual_seed(0)
    with device:
        model = AutoModel.from_config(config, dtype=dtype)
    kept = model._keep_in_fp32_modules_strict or ()  # only from_pretrained heeds it
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name.split(".") for part in kept):
            parameter.data = parameter.data.float()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def conv_functions(name: str, modeling, providers: Providers):
    """The two functions that the blocks of a modeling file call."""
    if name == "transformers":
        return modeling.causal_conv1d_fn, modeling.causal_conv1d_update
    if name == "causal-conv1d":
        dao = providers.dao

        def fn(x, weight, bias=None, activation=None, **ignored):
            return dao.causal_conv1d_fn(x, weight, bias, activation=activation)

        def update(x, state, weight, bias=None, activation=None):
            return dao.causal_conv1d_update(x, state, weight, bias, activation)

    else:
        fla = providers.fla

        def fn(x, weight, bias=None, activation=None, **ignored):
            y, _ = fla.causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
            return y.transpose(1, 2)

        def update(x, state, weight, bias=None, activation=None):
            y, _ = fla.causal_conv1d_update(
                x.squeeze(-1), state, weight=weight, bias=bias, activation=activation
            )
            return y.unsqueeze(-1)

    return fn, update


@contextmanager
def convolving(model, name: str, providers: Providers):
    """The model with one provider's convolution."""
    if name == "short-conv":
        with patch(model, providers.kernel, strict=True):
            yield
        return
    modeling = sys.modules[type(model).__module__]
    before = modeling.causal_conv1d_fn, modeling.causal_conv1d_update
    modeling.causal_conv1d_fn, modeling.causal_conv1d_update = conv_functions(
        name, modeling, providers
    )
    try:
        yield
    finally:
        modeling.causal_conv1d_fn, modeling.causal_conv1d_update = before


def seconds(run, device: torch.device):
    """(seconds, what run returned)"""

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


def infer(model, ids) -> tuple[dict, torch.Tensor]:
    """Seconds of a prefill and of one decode step after it; and the hidden states of both."""
    model.eval()
    with torch.no_grad():
        prefill, out = seconds(lambda: model(ids, use_cache=True), ids.device)

        def decode():
            for _ in range(STEPS):
                last = model(ids[:, -1:], past_key_values=out.past_key_values, use_cache=True)
            return last

        decode_s, last = seconds(decode, ids.device)
    hidden = torch.cat([out.last_hidden_state, last.last_hidden_state], 1)
    return {"prefill": prefill, "decode": decode_s / STEPS}, hidden


def train(model, ids) -> tuple[dict, torch.Tensor]:
    """Seconds of a forward and backward; and a gradient that every layer's convolution reaches."""
    model.train()

    def step():
        out = model(ids, use_cache=False).last_hidden_state
        out.backward(torch.ones_like(out))

    taken, _ = seconds(step, ids.device)
    gradient = model.get_input_embeddings().weight.grad
    model.zero_grad(set_to_none=True)
    return {"train": taken}, gradient


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).float().norm() / b.float().norm()).item()


def hold_to(name: str, got: float, limit: float) -> None:
    """Roundings of another convolution may move the result; another result is an error."""
    if not got <= limit:
        raise SystemExit(f"{name} gives another result: {got:.3g} of its norm away")


def measure_model(model, T, providers, names, rounds, limit, device) -> dict:
    """Medians over rounds in which the providers alternate, after one that warms and compares."""
    ids = torch.randint(1, DENSE["vocab_size"], (1, T), device=device)
    times = {name: {} for name in names}
    apart, failed = {}, {}
    for part in (infer, train):
        reference = None
        for turn in range(1 + rounds):
            for name in names:
                if (name, part.__name__) in failed:
                    continue
                try:
                    with convolving(model, name, providers):
                        found, result = part(model, ids)
                except torch.OutOfMemoryError as error:
                    failed[name, part.__name__] = str(error).splitlines()[0][:120]
                    model.zero_grad(set_to_none=True)
                    continue
                if turn == 0:
                    reference = result.cpu() if reference is None else reference
                    apart[f"{name} {part.__name__}"] = distance(result.cpu(), reference)
                    hold_to(f"{name} {part.__name__}", apart[f"{name} {part.__name__}"], limit)
                else:
                    for mode, value in found.items():
                        times[name].setdefault(mode, []).append(1e3 * value)
                del result
    return {
        "ms": {name: {mode: round(statistics.median(v), 3) for mode, v in modes.items()}
               for name, modes in times.items()},
        "relative_distance": apart,
        "failed": {" ".join(key): text for key, text in failed.items()},
    }  # fmt: skip


def conv_ms(model, T, providers, names) -> dict:
    """Milliseconds of all of the model's convolutions alone, by provider and mode."""
    convs = [m for m in model.modules() if isinstance(m, torch.nn.Conv1d)]
    D, W = convs[0].in_channels, convs[0].kernel_size[0]
    weight = "fp32" if convs[0].weight.dtype == torch.float32 else ""
    us = {}
    for kind, tokens in (("fwd", T), ("train", T), ("update", 1)):
        case = Case(kind, 1, tokens, D, W, weight=weight)
        inputs = [Inputs(case) for _ in range(2 if tokens > 1 else 64)]
        for name in names:
            calls = [providers.make(name, case, i) for i in inputs]
            if calls[0] is not None:
                us[name, kind] = replay_us(calls, 5)
        del inputs
        torch.cuda.empty_cache()
    per_ms = len(convs) / 1e3
    found = {}
    for name in names:
        ms = {kind: us[name, kind] * per_ms for kind in ("fwd", "train", "update")
              if (name, kind) in us}  # fmt: skip
        both = {"prefill": ms.get("fwd"), "decode": ms.get("update")}
        if "fwd" in ms and "train" in ms:
            both["train"] = ms["fwd"] + ms["train"]  # the layer's forward runs once more
        found[name] = {mode: round(v, 3) for mode, v in both.items() if v is not None}
    return found


class Stack:
    """One decode step of `layers` convolution layers, all on one provider."""

    def __init__(self, case: Case, layers: int, hidden: int, device: torch.device):
        self.case = case
        B, D, dtype = case.B, case.D, DTYPES[case.dtype]

        def matrix(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=dtype) / rows**0.5

        self.x = torch.randn(B, hidden, device=device, dtype=dtype)
        self.into = [matrix(hidden, D) for _ in range(layers)]
        self.out = [matrix(hidden, hidden) for _ in range(layers)]
        self.inputs = [Inputs(self.case, device) for _ in range(layers)]
        self.states = [i.state.clone() for i in self.inputs]

    def step(self, providers: Providers, name: str | None):
        """A step as a call; with name None without the convolutions."""
        convs = [providers.make(name, self.case, i) if name else None for i in self.inputs]

        def step() -> torch.Tensor:
            h = self.x
            for into, i, conv, out in zip(self.into, self.inputs, convs, self.out, strict=True):
                torch.mm(h, into, out=i.x)
                y = i.x if conv is None else conv()
                y = y[0] if isinstance(y, tuple) else y
                h = h + y.reshape(i.x.shape)[:, -h.shape[1] :] @ out
            return h

        return step

    def first(self, step) -> torch.Tensor:
        """What a step gives from the states as they were made."""
        for i, state in zip(self.inputs, self.states, strict=True):
            i.state.copy_(state)
        return step()


def measure_loop(B, tiny, providers, names, limit, device) -> dict:
    layers, hidden, D = (2, 64, 128) if tiny else (24, 4096, 8192)
    stack = Stack(Case("update", B, 1, D, dtype="fp32" if tiny else "bf16"), layers, hidden, device)
    steps = {name: stack.step(providers, name) for name in (*names, None)}
    reference = stack.first(steps[names[0]])
    for name in names[1:]:
        hold_to(f"{name} decode loop", distance(stack.first(steps[name]), reference), limit)
    if device.type == "cuda":
        us = {name: replay_us([step], 25) for name, step in steps.items()}
    else:
        us = {name: 1e6 * min(seconds(step, device)[0] for _ in range(5))
              for name, step in steps.items()}  # fmt: skip
    bare = us.pop(None)
    return {
        "B": B, "layers": layers, "hidden": hidden, "D": D,
        "us_without_convolution": round(bare, 2),
        "us": {name: round(v, 2) for name, v in us.items()},
        "tokens_per_s": {name: round(1e6 * B / v, 1) for name, v in us.items()},
    }  # fmt: skip


def show(models: list[dict], loop: list[dict], names, title: str) -> None:
    console = Console(width=150)
    table = Table(title=f"{title}: ms (of which the convolutions)")
    for column in ("model", "T", "mode", *names):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in models:
        for mode in ("prefill", "train", "decode"):
            cells = []
            for name in names:
                ms = row["ms"][name].get(mode)
                part = row["conv_ms"].get(name, {}).get(mode)
                share = f" ({part / ms:.1%})" if part and ms else ""
                cells.append(f"{ms:.1f}{share}" if ms else "-")
            table.add_row(row["model"], str(row["T"]), mode, *cells)
    console.print(table)
    table = Table(title="decode loop of convolution layers: tokens a second (us of convolutions)")
    for column in ("B", *names):
        table.add_column(column, justify="right")
    for row in loop:
        bare = row["us_without_convolution"]
        cells = [f"{row['tokens_per_s'][n]:.0f} ({row['us'][n] - bare:.1f})" for n in names]
        table.add_row(str(row["B"]), *cells)
    console.print(table)


def plot(models: list[dict], loop: list[dict], names, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = ("prefill", "train", "decode")
    figure, axes = plt.subplots(1, 4, figsize=(17, 4.5))
    for axis, mode in zip(axes, modes, strict=False):
        rows = [r for r in models if mode in r["ms"][names[0]]]
        labels = [f"{r['model']} {r['T'] // 1024}K" for r in rows]
        for n, name in enumerate(names):
            at = [x + 0.2 * n for x, r in enumerate(rows) if mode in r["ms"][name]]
            ratio = [r["ms"][name][mode] / r["ms"][names[0]][mode] for r in rows
                     if mode in r["ms"][name]]  # fmt: skip
            axis.bar(at, ratio, width=0.2, label=name)
        axis.set_xticks([x + 0.3 for x in range(len(rows))], labels, rotation=60, ha="right",
                        fontsize=7)  # fmt: skip
        axis.set(title=f"{mode}: time / {names[0]}", ylim=(0, 1.3))
    for name in names:
        axes[3].plot([r["B"] for r in loop], [r["tokens_per_s"][name] for r in loop], marker="o",
                     label=name)  # fmt: skip
    axes[3].set(title="decode loop: tokens/s", xlabel="B", xscale="log", yscale="log")
    axes[3].legend(fontsize=7)
    figure.suptitle("proxies with random weights")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=PROXIES, default=list(PROXIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32, 256], help="decode loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--tiny", action="store_true", help="small models, on any machine")
    parser.add_argument("--kernel", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("these models need a CUDA GPU; --tiny runs small ones anywhere")
    providers = Providers(get_local_kernel(args.kernel))
    absent = {"causal-conv1d": not providers.dao, "flash-linear-attention": not providers.fla}
    on_cpu = device.type == "cpu"
    names = [n for n in NAMES if not absent.get(n) and not (on_cpu and n in absent)]
    # bf16 through tens of random layers scatters; results with nothing in common are 1.4 apart.
    limit = 1e-4 if args.tiny else 0.5
    facts = machine(providers, "make bench-models")
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"{facts['device'].split()[-1].lower()}-models-{facts['date']}"
    stop = time.monotonic() + args.time_limit
    with torch.no_grad():
        loop = [measure_loop(B, args.tiny, providers, names, limit, device) for B in args.batch]
    models = []

    def write():
        payload = {"machine": facts, "proxies": "random weights", "models": models, "loop": loop}
        (args.out / f"{stem}.json").write_text(json.dumps(payload, indent=1) + "\n")

    write()
    for name in args.models:
        model = build(name, args.tiny, device)
        for T in args.tokens:
            if time.monotonic() > stop:
                print(f"time limit: {name} at {T} not measured")
                continue
            row = {"model": name, "T": T}
            row |= measure_model(model, T, providers, names, args.rounds, limit, device)
            with torch.no_grad():
                row["conv_ms"] = {} if on_cpu else conv_ms(model, T, providers, names)
            models.append(row)
            write()
        del model
    show(models, loop, names, f"{facts['device']}, torch {torch.__version__}, random weights")
    plot(models, loop, names, args.out / f"{stem}.png")


if __name__ == "__main__":
    main()
