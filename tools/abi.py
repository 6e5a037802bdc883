"""What an extension may ask of the system that loads it. Run before stripping: the manylinux and
abi3 checks read the symbol table that stripping removes, and would find nothing to object to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_abi_check import ObjectFile

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
SHIM = re.compile(r"\b((?:aoti_)?torch_\w+)\s*\(")
C_HEADERS = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")


def undefined_symbols(library: Path) -> list[str]:
    lines = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", "--format=posix", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [line.split()[0].split("@")[0] for line in lines]


def stable_shims(torch: Path, target: str) -> set[str]:
    """The functions that torch's C headers declare for a build that targets `target`."""
    source = "".join(f"#include <{header}>\n" for header in C_HEADERS)
    declared = subprocess.run(
        ["c++", "-E", "-P", "-x", "c++", "-std=c++17", f"-I{torch / 'include'}"]
        + [f"-DTORCH_TARGET_VERSION={target}", "-DUSE_CUDA=1", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(SHIM.findall(declared))


def violations(library: Path, shims: set[str]) -> list[str]:
    """One sentence for every symbol that breaks manylinux, abi3 or the stable torch ABI."""
    parsed = ObjectFile(str(library))
    found = [f"{MANYLINUX}: {v.name} {v.version}" for v in parsed.check_manylinux(MANYLINUX)]
    found += [f"abi3 {PYTHON_ABI}: {v.name}" for v in parsed.check_python_abi(PYTHON_ABI)]
    for symbol in undefined_symbols(library):
        if re.match(r"_Z\w*?(?:2at|3c10|5torch)", symbol):
            found.append(f"torch stable ABI: {symbol} is torch's C++")
        elif re.match(r"(?:aoti_)?torch_", symbol) and symbol not in shims:
            found.append(f"torch stable ABI: {symbol} is not in the targeted C headers")
    return found
