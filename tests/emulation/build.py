"""Builds a CPU variant whose ops run the CUDA kernels on the host, one thread after another.

It lets the whole suite judge the CUDA kernels' logic where there is no GPU. Where lanes of a warp
meet, the kernels have a form for threads that run in turn; warps.cpp proves the form that meets.

Usage: python tests/emulation/build.py FOLDER; then SHORT_CONV_KERNEL=FOLDER/emulated pytest
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import package  # noqa: E402
import project  # noqa: E402
import toolchain  # noqa: E402

FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-mfma", "-mf16c", "-DCPU_KERNEL",
         "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x03090000"]  # fmt: skip


def build(folder: Path) -> Path:
    """The built variant, FOLDER/emulated."""
    proj = project.load()
    torch, objects, target = toolchain.torch_dir(), folder / "objects", folder / "emulated"
    ops = f"_short_conv_emulated_{proj.state[:7]}"
    # The CUDA variant's sources, with its CPU kernels replaced by ones that call its launchers.
    sources = [
        ROOT / file
        for file in proj.sources("cuda", ".cpp") + proj.sources("cuda", ".cu")
        if "/cpu/" not in file and "compat" not in file
    ] + [HERE / "backend.cpp"]
    objects.mkdir(parents=True, exist_ok=True)
    include = [f"-I{HERE}", f"-I{torch}/include", f"-I{sysconfig.get_paths()['include']}"]

    def compile(source: Path) -> Path:
        to = objects / f"{source.name}.o"
        command = ["g++", *FLAGS, f"-DTORCH_EXTENSION_NAME={ops}", *include, "-x", "c++", "-c"]
        subprocess.run([*command, source, "-o", to], check=True)
        return to

    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(compile, sources))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(proj.package, target, ignore=shutil.ignore_patterns("__pycache__", "_ops.py"))
    library = target / f"{ops}.abi3.so"
    subprocess.run(
        ["g++", "-shared", *compiled, "-o", library, f"-L{torch}/lib", "-Wl,--no-as-needed",
         "-ltorch"],
        check=True,
    )  # fmt: skip
    (target / "_ops.py").write_text(package.OPS.format(ops=ops))
    package.write_metadata(proj, "cpu", target, ops)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
