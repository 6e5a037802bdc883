"""Where torch and the CUDA toolkit are, and how to link for older systems than this one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

# manylinux_2_28
GLIBC = (2, 28)


class Missing(RuntimeError):
    """A tool is not on this machine; the text says how to get it."""


def torch_dir() -> Path:
    """Without importing it, which would cost seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Missing("torch is not installed: pip install torch")
    return Path(spec.origin).parent


def find_nvcc() -> Path:
    """CUDA_HOME, then PATH, then the pip packages of this interpreter."""
    places = []
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        places.append(Path(found))
    places += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    for place in places:
        if place.is_file():
            return place.resolve()
    raise Missing("nvcc is not in CUDA_HOME, PATH or this environment: pip install '.[cuda-build]'")


def nvcc_release(nvcc: Path) -> str:
    text = output(nvcc, "--version")
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise Missing(f"{nvcc} --version names no release: {text!r}")
    return match[1]


def toolkit_dir(nvcc: Path) -> Path:
    """The toolkit that nvcc itself uses, also when nvcc is a wrapper that calls it."""
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True
    ).stderr
    match = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE)
    if match is None:
        raise Missing(f"{nvcc} --dryrun names no toolkit directory: {dry!r}")
    return Path(match[1]).resolve()


def old_glibc_header(folder: Path) -> Path:
    """A header that binds what is included after it to symbols of manylinux_2_28 at the latest.
    The assembler ignores names that a source does not use."""
    lines = [
        f'__asm__(".symver {name},{name}@{version}");' for name, version in old_versions().items()
    ]
    return written(folder / "old_glibc.h", "\n".join(lines) + "\n")


def find_cudart(toolkit: Path) -> Path:
    """The static CUDA runtime."""
    for place in ("lib*", "targets/*/lib"):
        for file in toolkit.glob(f"{place}/libcudart_static.a"):
            return file
    raise Missing(f"libcudart_static.a is not under {toolkit}: pip install '.[cuda-build]'")


def portable_cudart(toolkit: Path, folder: Path) -> Path:
    """A copy of the static CUDA runtime that asks for old symbols too."""
    table = "".join(f"{name} {name}@{version}\n" for name, version in old_versions().items())
    symbols, copy = written(folder / "old_glibc.syms", table), folder / "libcudart_static.a"
    if not copy.exists() or copy.stat().st_mtime < symbols.stat().st_mtime:
        command = ["objcopy", f"--redefine-syms={symbols}", find_cudart(toolkit), copy]
        subprocess.run(command, check=True)
    return copy


def written(path: Path, text: str) -> Path:
    """Leaves a file that is right alone, and with it everything built from it."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


@cache
def old_versions() -> dict[str, str]:
    """C library symbols whose default is newer than GLIBC -> their newest version that is not."""
    versions: dict[str, list[tuple[tuple[int, ...], bool]]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        table = output("readelf", "--dyn-syms", "--wide", linked(library))
        for name, at, version in re.findall(r" (\w+)(@@?)GLIBC_([\d.]+)$", table, re.MULTILINE):
            number = tuple(int(part) for part in version.split("."))
            versions.setdefault(name, []).append((number, at == "@@"))
    old = {}
    for name, found in sorted(versions.items()):
        usable = [number for number, _ in found if number <= GLIBC]
        if usable and any(default and number > GLIBC for number, default in found):
            old[name] = "GLIBC_" + ".".join(map(str, max(usable)))
    return old


def linked(library: str) -> str:
    """Where the compiler finds a library."""
    return output("c++", f"-print-file-name={library}").strip()


def cuobjdump(*arguments: str | Path) -> str:
    """What NVIDIA's tool of that name prints: the packaged one knows the newest architectures."""
    packaged = Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/cuobjdump")
    tool = next(packaged, None) or shutil.which("cuobjdump")
    if not tool:
        raise Missing("cuobjdump is missing: pip install '.[test]'")
    return output(tool, *arguments)


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
