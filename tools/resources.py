"""Registers, stack and occupancy of every kernel of the built CUDA variant, as a Markdown table.

Usage: python tools/resources.py > docs/kernel-resources.md
"""

from __future__ import annotations

import re
from collections import defaultdict

import project
import toolchain

# Threads that a multiprocessor holds at most, by architecture; its registers are 65536 on all.
THREADS = {80: 2048, 86: 1536, 87: 1536, 89: 1536, 90: 2048, 100: 2048, 103: 2048, 110: 1536,
           120: 1536, 121: 1536}  # fmt: skip
USAGE = re.compile(r"Function (\w+):\s*REG:(\d+) STACK:(\d+)")


def short_name(mangled: str) -> str:
    """fwd_kernel<VecIo<bf16, 4>, 4, exact, ...> in a few words."""
    text = toolchain.output("c++filt", mangled).strip()
    text = re.sub(r"short_conv::cuda::|\(short_conv::cuda::Packing\)|^void ", "", text)
    text = re.sub(r"\(short_conv::[^)]*\)$|\([A-Z][\w:, ]*\)$", "", text)
    return text.replace("__nv_bfloat16", "bf16").replace("__half", "fp16")


def block_threads(name: str) -> int:
    """The kThreads template argument; the backward has 64 (kBwdThreads)."""
    numbers = [int(n) for n in re.findall(r"\b(\d+)\b", name)]
    return next((n for n in numbers if n in (64, 128)), 64)


def occupancy(registers: int, arch: int, threads: int) -> int:
    """Percent of the threads that registers and block count leave room for."""
    per_warp = -(-registers * 32 // 256) * 256
    warps = 65536 // per_warp
    blocks = min(warps // (threads // 32), 32 if THREADS[arch] == 2048 else 24)
    return 100 * min(blocks * threads, THREADS[arch]) // THREADS[arch]


def main() -> None:
    (library,) = project.ROOT.glob("build/torch-stable-abi*-cu*/*.abi3.so")
    dump = toolchain.cuobjdump("-res-usage", library)
    table: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for cubin in dump.split("Fatbin elf code:")[1:]:
        arch = int(re.search(r"^arch = sm_(\d+)", cubin, re.MULTILINE)[1])
        for name, registers, stack in USAGE.findall(cubin):
            table[name][arch] = int(registers), int(stack)
    archs = sorted({arch for row in table.values() for arch in row})
    print("# Registers and occupancy of the CUDA kernels\n")
    print(
        "Made by `python tools/resources.py`. A cell is registers a thread / occupancy in percent;"
    )
    print("a kernel that uses stack (spills) would show it behind a `+`.\n")
    print("| kernel |" + "".join(f" sm_{a} |" for a in archs))
    print("|---|" + "---|" * len(archs))
    for name, row in sorted((short_name(k), v) for k, v in table.items()):
        cells = []
        for arch in archs:
            registers, stack = row[arch]
            cell = f"{registers} / {occupancy(registers, arch, block_threads(name))}"
            cells.append(cell + (f" +{stack}" if stack else ""))
        print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
