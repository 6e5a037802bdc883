"""The kernels beside a copy of the same bytes and beside every peer that is installed, in one run.

Device time is graph replay over buffers that rotate through several times the L2 cache, the median
of rounds in which all rows alternate; host time is the enqueueing of eager calls, apart. Every
result is compared with the fp64 reference first, and a wrong one stops the run.

C is the time of a copy of the same bytes: `copy_` where it is the fastest copy measured in the run,
else the bytes at the best copy rate measured (copy_ is slow at 512 MiB a tensor).

Also loaded by `kernels benchmark`: see the Benchmark classes at the end.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

ROOT = Path(__file__).resolve().parent.parent
ROTATE_BYTES = 250e6  # L2 of an H200 holds 60 MB
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One problem. kind: fwd (dense), packed, update, bwd (the backward alone) or train (forward
    and backward through autograd)."""

    kind: str
    B: int
    T: int
    D: int
    W: int = 4
    dtype: str = "bf16"
    weight: str = ""  # dtype; "" is x's
    bias: bool = False
    silu: bool = True
    layout: str = "dense"  # "slice": columns of a row three times as wide; "channel_first"
    lengths: str = ""  # packed: a name of LENGTHS
    states: bool = False

    @property
    def bytes(self) -> int:
        """What a copy is timed of. update: the state read and written; else x read and as much
        written. A backward reads x and dy and writes dx: 1.5 of that, 2.5 with the forward."""
        columns = self.W if self.kind == "update" else 1
        return 2 * self.B * self.T * self.D * columns * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        shape = f"{self.kind} [{self.B}, {self.T}, {self.D}]"
        if self.kind == "update":
            shape = f"update B {self.B} D {self.D}"
        extra = [self.dtype]
        extra += [f"W{self.W}"] * (self.W != 4) + ["bias"] * self.bias
        extra += [f"w {self.weight}"] * bool(self.weight) + ["no act"] * (not self.silu)
        extra += [self.layout] * (self.layout != "dense") + [self.lengths] * bool(self.lengths)
        extra += ["states"] * self.states
        return f"{shape} {' '.join(extra)}"


def _mixed(total: int, count: int) -> list[int]:
    """Lengths from short to long that add up, as a packed training batch has them."""
    weights = [1 + (7 * i) % 23 for i in range(count)]
    lengths = [total * w // sum(weights) for w in weights]
    lengths[-1] += total - sum(lengths)
    return lengths


LENGTHS = {
    "1 long": lambda T: [T],
    "68 mixed": lambda T: _mixed(T, 68),
    "of 8": lambda T: [8] * (T // 8),
    "of 1": lambda T: [1] * T,
    "with zeros": lambda T: [n for length in _mixed(T, 34) for n in (length, 0)],
}


def cases(suite: str) -> list[Case]:
    fwd = [
        Case("fwd", 1, T, D)
        for D in (2048, 4096, 8192, 12288, 24576)
        for T in (512, 2048, 8192, 32768)
    ]
    fwd += [
        Case("fwd", 1, 131072, 8192),
        Case("fwd", 1, 8192, 6144),
        Case("fwd", 1, 8192, 10240),
        Case("fwd", 4, 4096, 8192),
        Case("fwd", 8, 2048, 4096),
        Case("fwd", 4, 4096, 12288),
    ]
    variants = [
        Case("fwd", 1, 8192, 8192, bias=True),
        Case("fwd", 1, 8192, 8192, dtype="fp16"),
        Case("fwd", 1, 8192, 8192, dtype="fp32"),
        Case("fwd", 1, 8192, 8192, weight="fp32"),
        Case("fwd", 1, 8192, 24576, weight="fp32"),
        Case("fwd", 1, 8192, 8192, silu=False),
        Case("fwd", 1, 8192, 8192, layout="slice"),
        Case("fwd", 1, 8192, 8192, layout="channel_first"),
        Case("fwd", 1, 8192, 8192, states=True),
    ]
    variants += [Case("fwd", 1, 8192, 8192, W=W) for W in (2, 3, 7, 8)]
    variants += [Case("fwd", 1, 8192, 8200), Case("fwd", 1, 8192, 8191)]
    small = [Case("fwd", 1, T, 8192) for T in (1, 4, 16, 64, 256)]
    packed = [
        Case("packed", 1, 32768, 8192, lengths=name, states=states)
        for name in ("1 long", "68 mixed", "of 8", "with zeros")
        for states in (False, True)
    ]
    packed += [Case("packed", 1, 65536, 8192, lengths="of 1", states=s) for s in (False, True)]
    update = [Case("update", B, 1, D) for B in (1, 32, 256, 1024) for D in (2048, 8192, 24576)]
    update += [
        Case("update", 256, 1, 8192, dtype="fp32"),
        Case("update", 256, 1, 8192, W=3),
        Case("update", 256, 1, 8192, W=7),
        Case("update", 256, 1, 8192, W=8),
    ]
    bwd = [
        Case(kind, *shape, lengths=lengths, states=bool(lengths))
        for kind in ("bwd", "train")
        for shape, lengths in [
            ((1, 2048, 8192), ""),
            ((1, 8192, 8192), ""),
            ((1, 32768, 8192), ""),
            ((4, 4096, 8192), ""),
            ((1, 8192, 24576), ""),
            ((1, 32768, 8192), "68 mixed"),
        ]
    ]
    bwd += [Case(kind, 1, 8192, 8192, layout="channel_first") for kind in ("bwd", "train")]
    suites = {
        "fwd": fwd,
        "variants": variants,
        "small": small,
        "packed": packed,
        "update": update,
        "bwd": bwd,
    }
    return [c for s in suites.values() for c in s] if suite == "all" else suites[suite]  # fmt: skip


class Inputs:
    """One set of tensors of a case."""

    def __init__(self, case: Case, device: torch.device | str = "cuda"):
        dtype = DTYPES[case.dtype]
        B, T, D, W = case.B, case.T, case.D, case.W
        weight_dtype = DTYPES[case.weight] if case.weight else dtype
        self.weight = (torch.randn(D, W, device=device) / W**0.5).to(weight_dtype)
        self.bias = torch.randn(D, device=device).to(weight_dtype) if case.bias else None
        self.silu = "silu" if case.silu else None
        if case.kind == "update":
            self.x = torch.randn(B, D, device=device).to(dtype)
            self.state = torch.randn(B, D, W, device=device).to(dtype)
            self.spare = torch.empty_like(self.state)
            self.y = torch.empty_like(self.x)
            return
        if case.layout == "slice":
            self.x = torch.randn(B, T, 3 * D, device=device, dtype=dtype)[..., D : 2 * D]
        elif case.layout == "channel_first":
            self.x = torch.randn(B, D, T, device=device, dtype=dtype).transpose(1, 2)
        else:
            self.x = torch.randn(B, T, D, device=device, dtype=dtype)
        self.y = torch.empty_like(self.x)
        self.dense = torch.empty(B * T * D, dtype=dtype, device=device)
        self.dense_out = torch.empty_like(self.dense)
        self.cu = self.ids = self.state = self.final = None
        N = B
        if case.lengths:
            lengths = torch.tensor(LENGTHS[case.lengths](T), device=device)
            self.cu = F.pad(lengths.cumsum(0), (1, 0)).int()
            order = torch.arange(lengths.numel(), device=device)
            self.ids = torch.repeat_interleave(order, lengths).int()[None]
            N = lengths.numel()
        if case.states:
            self.state = torch.randn(N, D, W, device=device).to(dtype)
            self.final = torch.empty_like(self.state)
        if case.kind in ("bwd", "train"):
            self.dy = torch.randn_like(self.x)
            self.dfinal = None if self.final is None else torch.randn_like(self.final)
            self.dx, self.dweight = torch.empty_like(self.x), torch.empty_like(self.weight)
            self.dstate = None if self.state is None else torch.empty_like(self.state)

    def gradients(self, forward):
        """A call that differentiates forward(self) by x, weight and the state."""

        @torch.enable_grad()
        def train():
            wanted = [t.detach().requires_grad_() for t in (self.x, self.weight, self.state)
                      if t is not None]  # fmt: skip
            results = forward(*wanted)
            results = results if isinstance(results, tuple) else (results,)
            given = [self.dy, self.dfinal][: len(results)]
            return torch.autograd.grad(results, wanted, given)

        return train


class Providers:
    """Each method gives a callable for one set of inputs, or None where a peer has no such call."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.qwen = transformers_file("qwen3_5")
        self.dao = _optional("causal_conv1d")
        self.fla = _optional("fla.modules.convolution")
        self.cudnn = _optional("cudnn.ops") or _optional("cudnn")
        self.compiled = torch.compile(_shift_and_add, dynamic=False)

    NAMES = (
        "short-conv",
        "causal-conv1d",
        "flash-linear-attention",
        "cudnn nwh",
        "torch.compile",
        "transformers",
    )

    def make(self, name: str, case: Case, i: Inputs):
        return getattr(self, name.replace("-", "_").replace(" ", "_").replace(".", "_"))(case, i)

    def short_conv(self, case, i):
        k = self.kernel
        if case.kind == "update":
            return lambda: k.causal_conv1d_update(i.x, i.state, i.weight, i.bias, i.silu, out=i.y)
        if case.kind == "bwd":
            return lambda: k.calls.bwd(i.x, i.dy, i.weight, None, i.state, i.dfinal, i.cu, None,
                                       i.dx, i.dweight, None, i.dstate, case.silu)  # fmt: skip
        if case.kind == "train":
            return i.gradients(lambda x, weight, state=None: k.causal_conv1d(
                x, weight, activation=i.silu, initial_state=state, cu_seqlens=i.cu,
                return_final_state=case.states,
            ))  # fmt: skip
        return lambda: k.causal_conv1d(
            i.x, i.weight, i.bias, activation=i.silu, initial_state=i.state, cu_seqlens=i.cu,
            final_state_out=i.final, out=i.y,
        )  # fmt: skip

    def causal_conv1d(self, case, i):
        if not self.dao or case.W > 4 or case.D % 8 or (case.states and case.lengths):
            return None
        if case.kind == "bwd":
            bwd = importlib.import_module("causal_conv1d.cpp_functions").causal_conv1d_bwd_function
            channels_first = [t.transpose(1, 2) for t in (i.x, i.dy, i.dx)]
            return lambda: bwd(channels_first[0], i.weight, None, channels_first[1], i.ids, None,
                               None, channels_first[2], False, case.silu)  # fmt: skip
        if case.kind == "train":
            return i.gradients(lambda x, weight: self.dao.causal_conv1d_fn(
                x.transpose(1, 2), weight, None, seq_idx=i.ids, activation=i.silu
            ).transpose(1, 2))  # fmt: skip
        if case.kind == "update":
            update = self.dao.causal_conv1d_update
            return lambda: update(i.x, i.state, i.weight, i.bias, i.silu)
        state = None
        if case.states:
            state = i.state[..., 1:].transpose(1, 2).contiguous().transpose(1, 2)
        return lambda: self.dao.causal_conv1d_fn(
            i.x.transpose(1, 2), i.weight, i.bias, seq_idx=i.ids, initial_states=state,
            return_final_states=case.states, activation=i.silu,
        )  # fmt: skip

    def flash_linear_attention(self, case, i):
        if not self.fla:
            return None
        if case.kind == "update":
            update = self.fla.causal_conv1d_update
            return lambda: update(i.x, i.state, weight=i.weight, bias=i.bias, activation=i.silu)
        cpu = None if i.cu is None else i.cu.cpu()
        if case.kind == "bwd":
            return None
        if case.kind == "train":
            return i.gradients(lambda x, weight, state=None: self.fla.causal_conv1d(
                x, weight, None, initial_state=state, output_final_state=case.states,
                activation=i.silu, cu_seqlens=i.cu, cu_seqlens_cpu=cpu,
            )[: 1 + case.states])  # fmt: skip
        return lambda: self.fla.causal_conv1d(
            i.x, i.weight, i.bias, initial_state=i.state, output_final_state=case.states,
            activation=i.silu, cu_seqlens=i.cu, cu_seqlens_cpu=cpu,
        )  # fmt: skip

    def cudnn_nwh(self, case, i):
        plain = case.kind == "fwd" and not case.states and case.layout == "dense" and case.silu
        if not hasattr(self.cudnn, "causal_conv1d_nwh") or not plain or case.weight:
            return None
        taps = i.weight.t().contiguous()
        return lambda: self.cudnn.causal_conv1d_nwh(i.x, taps, i.bias, "silu")

    def torch_compile(self, case, i):
        if case.kind != "fwd" or case.states or case.W != 4 or case.T > 32768:
            return None
        return lambda: self.compiled(i.x, i.weight, i.bias, case.silu)

    def transformers(self, case, i):
        if not self.qwen or case.T > 32768 or case.lengths or case.states or case.kind == "bwd":
            return None
        if case.kind == "update":
            x = i.x[..., None]
            update = self.qwen.causal_conv1d_update
            return lambda: update(x, i.state, i.weight, i.bias, i.silu)
        fn = self.qwen.causal_conv1d_fn
        if case.kind == "train":
            return i.gradients(lambda x, weight: fn(
                x.transpose(1, 2), weight, None, activation=i.silu
            ).transpose(1, 2))  # fmt: skip
        return lambda: fn(i.x.transpose(1, 2), i.weight, i.bias, activation=i.silu)


def _optional(name: str):
    try:
        return importlib.import_module(name)
    except Exception:  # a peer that is absent or does not load here is left out, by name
        return None


def transformers_file(family: str):
    """A modeling file with its own conv functions: it takes causal-conv1d's where it finds them."""
    dao = sys.modules.get("causal_conv1d")
    sys.modules["causal_conv1d"] = None  # an import of it fails
    try:
        return _optional(f"transformers.models.{family}.modeling_{family}")
    finally:
        del sys.modules["causal_conv1d"]
        if dao is not None:
            sys.modules["causal_conv1d"] = dao


def _shift_and_add(x, weight, bias, silu: bool):
    W, T = weight.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, W - 1, 0)).float()
    y = sum(padded[:, k : k + T] * weight[:, k].float() for k in range(W))
    y = y if bias is None else y + bias.float()
    return (F.silu(y) if silu else y).to(x.dtype)


def check_gradients(providers: Providers, case: Case, i: Inputs) -> None:
    """dx, dweight and the state's gradient of the first channels against fp64 autograd."""
    c, W = 32, case.W
    train = providers.short_conv(replace(case, kind="train"), i)
    got = [g[..., :c] if n == 0 else g[:c] if n == 1 else g[:, :c] for n, g in enumerate(train())]
    x, weight = i.x[..., :c].double(), i.weight[:c].double()
    state = None if i.state is None else i.state[:, :c].double()
    leaves = [t.requires_grad_() for t in (x, weight, state) if t is not None]
    bounds = [(0, case.T)] if i.cu is None else list(zip(i.cu[:-1].tolist(), i.cu[1:].tolist(),
                                                         strict=True))  # fmt: skip
    with torch.enable_grad():
        loss = 0.0
        for n, (start, end) in enumerate(bounds):
            before = x.new_zeros(case.B, W, c) if state is None else state[n].t()[None]
            stream = torch.cat([before, x[:, start:end]], 1)
            z = sum(stream[:, k + 1 : k + 1 + end - start] * weight[:, k] for k in range(W))
            y = F.silu(z) if case.silu else z
            loss = loss + (y * i.dy[:, start:end, :c]).sum()
            if state is not None:
                loss = loss + (stream[:, -W:].transpose(1, 2) * i.dfinal[n, :c]).sum()
        exact = torch.autograd.grad(loss, leaves)
    for name, a, b in zip(("dx", "dweight", "dstate"), got, exact, strict=False):
        # Sums over all rows are held to the rounding of their terms.
        slack = 1e-6 * case.B * case.T if name == "dweight" else 1e-4
        error = (a.double() - b).abs() - (torch.finfo(a.dtype).eps * b.abs() + slack)
        if not (error <= 0).all():
            raise SystemExit(f"wrong {name}: {case}: {error.max().item():.3g} past one ulp")


def check(providers: Providers, case: Case) -> None:
    """The last rows and first channels against fp64; before any timing."""
    i = Inputs(case)
    if case.kind in ("bwd", "train"):
        return check_gradients(providers, case, i)
    reference = providers.kernel.reference
    c = min(case.D, 64)
    before = i.state[:4, :c].clone() if case.kind == "update" else None
    providers.short_conv(case, i)()
    bias = None if i.bias is None else i.bias[:c]
    eps = torch.finfo(DTYPES[case.dtype]).eps
    if case.kind == "update":
        rows = slice(0, min(case.B, 4))
        exact, _ = reference.update(i.x[rows, :c], before, i.weight[:c], bias, silu=case.silu)
        got = i.y[rows, :c]
    else:
        T = min(case.T, 70)
        if case.lengths:
            # Whole sequences from the end, or the end of one long enough.
            start = int(i.cu[i.cu <= case.T - min(T, 20)][-1])
            if case.T - start > 4096:
                return
            cu = i.cu[i.cu >= start] - start
            first = i.cu.numel() - cu.numel()
            state = None if i.state is None else i.state[first:, :c]
            exact, _ = reference.fwd(
                i.x[:, start:, :c], i.weight[:c], bias, silu=case.silu, cu_seqlens=cu,
                initial_state=state,
            )  # fmt: skip
            got = i.y[:, start:, :c]
        else:
            state = None if i.state is None or T < case.T else i.state[:, :c]
            exact, _ = reference.fwd(
                i.x[:, case.T - T :, :c], i.weight[:c], bias, silu=case.silu, initial_state=state
            )
            skip = 0 if T == case.T else case.W - 1
            exact, got = exact[:, skip:], i.y[:, case.T - T + skip :, :c]
    error = (got.double() - exact).abs() - (eps * exact.abs() + 2e-5)
    if not (error <= 0).all():
        raise SystemExit(f"wrong result: {case}: {error.max().item():.3g} past one ulp")


def replay_us(calls: list, repeats: int) -> float:
    """Microseconds of one call in a replayed graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def host_us(call, count: int = 300) -> float:
    """Microseconds of the host per eager call, without waiting for the device."""
    for _ in range(20):
        call()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure(providers: Providers, case: Case, names: list[str], repeats: int, host: bool) -> dict:
    check(providers, case)
    count = int(min(64, max(2, ROTATE_BYTES // case.bytes + 1)))
    inputs = [Inputs(case) for _ in range(count)]
    passes = max(1, min(8, 24 // count)) if case.bytes < 100e6 else 1
    copies = [
        (lambda i=i: i.spare.copy_(i.state))
        if case.kind == "update"
        else (lambda i=i: i.dense_out.copy_(i.dense))
        for i in inputs
    ]
    rows = {"copy_": copies}
    for name in names:
        made = [providers.make(name, case, i) for i in inputs]
        if made[0] is not None:
            rows[name] = made
    us: dict[str, list[float]] = {}
    failed = {}
    for _ in range(2):  # two rounds in alternation; the better median of each
        for name, calls in rows.items():
            if name in failed:
                continue
            try:
                figure = replay_us(calls * passes, repeats)
            except Exception as error:
                if name in ("copy_", "short-conv"):
                    raise
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
            us.setdefault(name, []).append(figure)
    result = {"case": str(case), **asdict(case), "bytes": case.bytes, "failed": failed}
    result["us"] = {name: round(min(values), 3) for name, values in us.items()}
    if host:
        result["host_us"] = {
            name: round(host_us(calls[0]), 2) for name, calls in rows.items() if name in us
        }
    return result


def add_ratios(results: list[dict]) -> None:
    """C of every case: its copy_, or its bytes at the best rate of the run if that is sooner."""
    large = [r for r in results if r["bytes"] >= 64e6]
    best = max((r["bytes"] / r["us"]["copy_"] for r in large), default=0)
    for r in results:
        floor = r["bytes"] / best if best else float("inf")
        r["C_us"] = round(
            min(r["us"]["copy_"], floor) if r["bytes"] >= 500e6 else r["us"]["copy_"], 3
        )
        r["ratio"] = {name: round(us / r["C_us"], 3) for name, us in r["us"].items()}


def show(results: list[dict], names: list[str], machine: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{machine['device']}, torch {machine['torch']}: time as a ratio to C")
    table.add_column("case", no_wrap=True)
    for column in ("C us", "TB/s", *names, "host us"):
        table.add_column(column, justify="right")
    for r in results:
        cells = [f"{r['ratio'][n]:.2f}" if n in r["ratio"] else "" for n in names]
        ours = r["us"].get("short-conv", float("nan"))
        host = r.get("host_us", {}).get("short-conv")
        table.add_row(
            r["case"], f"{r['C_us']:.2f}", f"{r['bytes'] / ours / 1e6:.2f}", *cells,
            f"{host:.1f}" if host else "",
        )  # fmt: skip
    Console(width=170).print(table)


def plot(results: list[dict], names: list[str], folder: Path, stem: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def plain(r):
        return (
            r["kind"] == "fwd"
            and r["dtype"] == "bf16"
            and r["W"] == 4
            and r["B"] == 1
            and (
                r["layout"] == "dense"
                and not (r["bias"] or r["weight"] or r["states"])
                and r["silu"]
            )
        )

    rows = [r for r in results if plain(r)]
    if not rows:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    for name in names:
        line = sorted((r["T"], r["ratio"][name]) for r in rows
                      if r["D"] == 8192 and name in r["ratio"])  # fmt: skip
        if line:
            left.plot(*zip(*line, strict=True), marker="o", label=name)
        points = sorted((r["bytes"], r["bytes"] / r["us"][name] / 1e6) for r in rows
                        if name in r["us"])  # fmt: skip
        if points:
            right.plot(*zip(*points, strict=True), marker=".", linestyle="none", label=name)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(xscale="log", xlabel="T (D = 8192, bf16)", ylabel="time / copy", ylim=(0.8, 4))
    right.set(xscale="log", xlabel="bytes read and written", ylabel="TB/s")
    left.legend()
    figure.tight_layout()
    figure.savefig(folder / f"{stem}.png", dpi=110)


@torch.no_grad()
def main() -> None:
    from kernels import get_local_kernel
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    suites = ["all", "fwd", "variants", "small", "packed", "update", "bwd"]
    parser.add_argument("--suite", nargs="+", choices=suites, default=["all"])
    parser.add_argument("--providers", nargs="+", choices=Providers.NAMES, default=Providers.NAMES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--kernel", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; `make bench-cpu` measures the CPU")
    torch.manual_seed(0)
    providers = Providers(get_local_kernel(args.kernel))
    wanted = list(dict.fromkeys(c for suite in args.suite for c in cases(suite)))
    results, stop = [], time.monotonic() + args.time_limit
    for case in track(wanted, "measuring", transient=True):
        if time.monotonic() > stop:
            print(f"time limit: {len(wanted) - len(results)} of {len(wanted)} cases not measured")
            break
        host = case.kind == "update" or case.T <= 64
        results.append(measure(providers, case, list(args.providers), args.repeats, host))
        torch.cuda.empty_cache()
    add_ratios(results)
    facts = machine(providers, "make bench")
    show(results, list(args.providers), facts)
    stem = f"{facts['device'].split()[-1].lower()}-{'-'.join(args.suite)}-{facts['date']}"
    args.out.mkdir(parents=True, exist_ok=True)
    payload = {"machine": facts, "results": results}
    (args.out / f"{stem}.json").write_text(json.dumps(payload, indent=1) + "\n")
    plot(results, list(args.providers), args.out, stem)


def machine(providers: Providers, command: str) -> dict:
    """What a results file says of where it was measured."""
    packages = ("causal-conv1d", "flash-linear-attention", "nvidia-cudnn-frontend", "triton",
                "transformers", "kernels")  # fmt: skip
    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernel": providers.kernel.__name__,
        "command": command,
        "versions": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class ShortConvBenchmark(Benchmark):
    """What `kernels benchmark` runs: model-sized prefill and decode, verified."""

    seed = 0

    def setup_prefill(self):
        self.x = torch.randn(1, 4096, 8192, device=self.device, dtype=torch.bfloat16)
        self.weight = torch.randn(8192, 4, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def benchmark_prefill(self):
        self.kernel.causal_conv1d(self.x, self.weight, activation="silu", out=self.out)

    def verify_prefill(self) -> torch.Tensor:
        return _shift_and_add(self.x, self.weight, None, True)

    def setup_decode(self):
        self.x = torch.randn(256, 8192, device=self.device, dtype=torch.bfloat16)
        self.weight = torch.randn(8192, 4, device=self.device, dtype=torch.bfloat16)
        self.state = torch.zeros(256, 8192, 4, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def benchmark_decode(self):
        self.kernel.causal_conv1d_update(
            self.x, self.state.zero_(), self.weight, activation="silu", out=self.out
        )

    def verify_decode(self) -> torch.Tensor:
        return F.silu(self.x.float() * self.weight[:, 3].float()).to(self.x.dtype)


if __name__ == "__main__":
    main()
