"""The CPU backend beside a copy, torch's own operators and transformers' functions, in one run.

Every figure is the median of alternating rounds, so that a slow spell hits all rows alike. Prefill
rotates among buffers that together exceed the last-level cache, as a model's activations do; decode
runs on one state, as a model's does. A result is compared with the fp64 reference before anything
is timed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from kernels import get_local_kernel
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

ROOT = Path(__file__).resolve().parent.parent
PREFILL = [(1, 2048, 8192), (1, 512, 8192), (4, 512, 2048), (1, 64, 8192)]
BACKWARD = [(1, 2048, 8192), (4, 512, 2048)]
DECODE = [(1, 8192), (8, 8192), (32, 8192)]
ROTATE_BYTES = 256 << 20  # several times the last-level cache of one socket's share
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def torch_path(x, weight):
    """Depthwise F.conv1d and SiLU as a user writes them, from and to [B, T, D]."""
    D, W = weight.shape
    y = F.conv1d(x.transpose(1, 2), weight[:, None], padding=W - 1, groups=D)
    return F.silu(y[..., : x.shape[1]]).transpose(1, 2)


def prefill_runs(kernel, B, T, D, dtype):
    x, weight = torch.randn(B, T, D).to(dtype), torch.randn(D, 4).to(dtype)
    y = torch.empty_like(x)
    exact, _ = kernel.reference.fwd(x[:, -64:, :64], weight[:64], silu=True)
    kernel.causal_conv1d(x, weight, activation="silu", out=y)
    error = (y[:, -61:, :64].double() - exact[:, 3:]).abs()
    allowed = 2 * torch.finfo(dtype).eps * exact[:, 3:].abs() + 1e-5
    if not (error <= allowed).all():
        raise SystemExit(f"wrong result at {(B, T, D, dtype)}: off by {error.max():.3g}")
    count = max(2, ROTATE_BYTES // (2 * x.nbytes))
    pairs = [(x.clone(), torch.empty_like(x)) for _ in range(count)]

    def rotating(run):
        turn = itertools.cycle(pairs)
        return lambda: run(*next(turn))

    return {
        "copy": rotating(lambda x, y: y.copy_(x)),
        "short-conv": rotating(
            lambda x, y: kernel.causal_conv1d(x, weight, activation="silu", out=y)
        ),
        "torch": rotating(lambda x, y: torch_path(x, weight)),
        "transformers": rotating(
            lambda x, y: qwen.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu")
        ),
    }


@torch.enable_grad()
def backward_runs(kernel, B, T, D, dtype):
    """Gradients of x and weight, of a forward that ran before."""
    x, weight = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((B, T, D), (D, 4)))
    dy, spare = torch.randn(B, T, D).to(dtype), torch.empty(B, T, D, dtype=dtype)
    outputs = {
        "short-conv": kernel.causal_conv1d(x, weight, activation="silu"),
        "torch": torch_path(x, weight),
        "transformers": qwen.causal_conv1d_fn(
            x.transpose(1, 2), weight, activation="silu"
        ).transpose(1, 2),
    }
    exact_x, exact_weight = (t[..., :64].detach().double() for t in (x, weight.t()))
    exact_x.requires_grad_()
    loss = (torch_path(exact_x, exact_weight.t()) * dy[..., :64].double()).sum()
    exact = torch.autograd.grad(loss, exact_x)[0]
    dx = torch.autograd.grad(outputs["short-conv"], x, dy, retain_graph=True)[0][..., :64]
    if not ((dx.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all():
        raise SystemExit(f"wrong gradient at {(B, T, D, dtype)}")

    def differentiate(y):
        return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    runs = {name: differentiate(y) for name, y in outputs.items()}
    return {"copy": lambda: spare.copy_(x.detach()), **runs}


def decode_runs(kernel, B, D, dtype):
    x, weight = torch.randn(B, D, 1).to(dtype), torch.randn(D, 4).to(dtype)
    ours, theirs = torch.randn(B, D, 4).to(dtype), torch.randn(B, D, 4).to(dtype)
    exact, _ = kernel.reference.update(x, ours, weight, silu=True)
    y = kernel.causal_conv1d_update(x, ours, weight, activation="silu")
    if not ((y.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all():
        raise SystemExit(f"wrong result at {(B, D, dtype)}")
    spare = torch.empty_like(ours)
    return {
        "copy": lambda: spare.copy_(ours),
        "short-conv": lambda: kernel.causal_conv1d_update(x, ours, weight, activation="silu"),
        "transformers": lambda: qwen.causal_conv1d_update(x, theirs, weight, None, "silu"),
    }


def median_seconds(runs: dict, rounds: int) -> dict[str, float]:
    loops = {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        loops[name] = max(1, int(0.01 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(loops[name]):
                run()
            times[name].append((time.perf_counter() - start) / loops[name])
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernel", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, help="JSON; default benchmarks/results/cpu-DATE.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kernel = get_local_kernel(args.kernel, backend="cpu")

    kinds = {
        "prefill": (prefill_runs, PREFILL),
        "backward": (backward_runs, BACKWARD),
        "decode": (decode_runs, DECODE),
    }
    cases = [(kind, shape) for kind, (_, shapes) in kinds.items() for shape in shapes]
    rows = []
    for (kind, shape), dtype in track(
        [(case, dtype) for case in cases for dtype in DTYPES], "measuring", transient=True
    ):
        seconds = median_seconds(kinds[kind][0](kernel, *shape, DTYPES[dtype]), args.rounds)
        rows.append({"kind": kind, "shape": shape, "dtype": dtype, "us": {
            name: round(1e6 * value, 2) for name, value in seconds.items()
        }})  # fmt: skip

    machine = {
        "date": str(datetime.date.today()), "cpu": cpu_name(), "threads": args.threads,
        "isa": os.environ.get("SHORT_CONV_CPU_ISA", "best of this processor"),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "kernel": kernel.__name__, "command": "make bench-cpu",
        "bytes": "copy moves as many bytes as x and y, or the state twice (decode)",
    }  # fmt: skip
    table = Table(title=f"{machine['cpu']}, {args.threads} threads, torch {torch.__version__}")
    columns = ["", "dtype", "copy us", "short-conv us", "/ copy", "torch x", "transformers x"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "dtype") else "right")
    for row in rows:
        us = row["us"]
        ours = us["short-conv"]
        table.add_row(
            f"{row['kind']} {list(row['shape'])}", row["dtype"], f"{us['copy']:.1f}", f"{ours:.1f}",
            f"{ours / us['copy']:.2f}", f"{us['torch'] / ours:.1f}" if "torch" in us else "",
            f"{us['transformers'] / ours:.1f}",
        )  # fmt: skip
    Console().print(table)
    out = args.out or ROOT / "benchmarks" / "results" / f"cpu-{machine['date']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
