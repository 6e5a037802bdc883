"""q, k and v of a delta-rule block: concatenated, convolved and split, or convolved where they are.

Every figure is the median of alternating rounds over buffers that together exceed the last-level
cache. The results are compared before anything is timed. Runs on the GPU where there is one.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from short_conv_transformers import load_kernel

PREFILL = [(2048, 4096), (512, 8192), (2048, 8192)]  # tokens, channels of each of q, k and v
DECODE = [(1, 4096), (1, 8192)]
ROTATE_BYTES = 256 << 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def median_ms(runs: dict, rounds: int) -> dict:
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(found[2:]) for name, found in times.items()}


def parts(weight, state, D):
    return [(weight[i * D : i * D + D], state[:, i * D : i * D + D]) for i in range(3)]


def measure(kernel, T, D, dtype) -> dict:
    count = max(2, ROTATE_BYTES // (6 * T * D * dtype.itemsize)) if T > 1 else 1
    inputs = itertools.cycle(
        [torch.randn(3, 1, T, D, device=DEVICE).to(dtype).unbind(0) for _ in range(count)]
    )
    weight = torch.randn(3 * D, 4, device=DEVICE).to(dtype)
    state = torch.zeros(1, 3 * D, 4, device=DEVICE, dtype=dtype)

    def convolve(x, weight, state):
        if T == 1:
            return kernel.causal_conv1d_update(x[:, 0], state, weight, None, "silu")
        return kernel.causal_conv1d(x, weight, activation="silu", final_state_out=state)

    def joined():
        return convolve(torch.cat(next(inputs), -1), weight, state).split([D] * 3, -1)

    def contiguous():
        return [part.contiguous() for part in joined()]

    def apart():
        return [
            convolve(x, *own) for x, own in zip(next(inputs), parts(weight, state, D), strict=True)
        ]

    x = next(inputs)
    zeros = state.clone(), state.clone()
    whole = convolve(torch.cat(x, -1), weight, zeros[0])
    each = [convolve(p, *own) for p, own in zip(x, parts(weight, zeros[1], D), strict=True)]
    if not torch.equal(whole, torch.cat(each, -1)) or not torch.equal(*zeros):
        raise SystemExit(f"different results at {(T, D, dtype)}")
    return median_ms({"joined": joined, "contiguous": contiguous, "apart": apart}, 23)


@torch.no_grad()
def main() -> None:
    kernel = load_kernel()
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    table = Table(title=f"{name}, {torch.get_num_threads()} threads, ms")
    for column in ("channels", "tokens", "dtype", "cat, conv, split", "made contiguous", "apart"):
        table.add_column(column, justify="right")
    for (T, D), dtype in itertools.product(PREFILL + DECODE, (torch.bfloat16, torch.float32)):
        found = measure(kernel, T, D, dtype)
        table.add_row(f"3 x {D}", str(T), str(dtype)[6:], *(f"{ms:.3f}" for ms in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
