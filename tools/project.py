"""What build.toml says: the one list of sources, flags, architectures and ABI."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from kernels._rust import Build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# A change in any of these is a new source state, and gets an op namespace of its own.
STATE = ("build.toml", "CMakeLists.txt", "cmake", "kernel_src", "torch-ext")
GENERATED = ("_ops.py",)


@dataclass(frozen=True)
class Project:
    root: Path
    name: str
    version: int
    license: str
    toml: dict
    state: str  # digest of the sources as they were when the project was loaded
    chosen_archs: tuple[str, ...]  # none: all

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    def sections(self, backend: str) -> list[dict]:
        return [s for s in self.toml["kernel"].values() if s["backend"] == backend]

    def listed(self, backend: str) -> list[str]:
        """Every file that a backend lists, in order, once."""
        files = [*self.toml["torch"]["src"]]
        for section in self.sections(backend):
            files += section["src"]
        return list(dict.fromkeys(files))

    def sources(self, backend: str, suffix: str) -> list[str]:
        return [file for file in self.listed(backend) if file.endswith(suffix)]

    def tree(self, backend: str) -> Path:
        """Where a variant is compiled; a choice of architectures does not disturb the full one."""
        return self.root / ".cmake" / "-".join([backend, *self.chosen_archs])

    def options(self, backend: str) -> dict[str, list[str]]:
        """Compile options by source. One that stands in two sections gets those of both."""
        options: dict[str, list[str]] = {}
        for section in self.sections(backend):
            for file in section["src"]:
                mine = options.setdefault(file, [])
                if file.endswith(".cpp"):
                    mine += section.get("cxx-flags", [])
                elif file.endswith(".cu"):
                    mine += section.get("cuda-flags", [])
                    for capability in section.get("cuda-capabilities", []):
                        mine += gencode(capability)
        return {file: list(dict.fromkeys(flags)) for file, flags in options.items()}

    def archs(self, backend: str) -> list[str]:
        found = [a for s in self.sections(backend) for a in s.get("cuda-capabilities", [])]
        return sorted(set(found), key=lambda arch: float(arch.split("+")[0]))

    def stable_abi(self, backend: str) -> tuple[int, int]:
        major, minor = self.toml["torch"]["stable-abi"][backend].split(".")
        return int(major), int(minor)

    def variant(self, backend: str, toolkit: str = "") -> str:
        """The hub's name of a variant; `toolkit` is the CUDA release, such as "13.0"."""
        abi = "{}{}".format(*self.stable_abi(backend))
        device = "cu" + toolkit.replace(".", "") if backend == "cuda" else backend
        return f"torch-stable-abi{abi}-{device}-{platform.machine()}-linux"

    def ops(self, backend: str) -> str:
        """The op namespace, which is also the extension's module name."""
        return f"_{self.python_name}_{backend}_{self.state[:7]}"


def gencode(capability: str) -> list[str]:
    arch, _, ptx = capability.partition("+")
    arch = arch.replace(".", "")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    return flags + [f"-gencode=arch=compute_{arch},code=compute_{arch}"] if ptx else flags


def source_state(root: Path) -> str:
    digest = hashlib.sha256()
    for path in state_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def state_files(root: Path) -> list[Path]:
    files = []
    for name in STATE:
        path = root / name
        files += path.rglob("*") if path.is_dir() else [path]
    return sorted(
        f for f in files if f.is_file() and f.suffix != ".pyc" and f.name not in GENERATED
    )


def load(root: Path = ROOT, chosen_archs: tuple[str, ...] = ()) -> Project:
    """Reads build.toml, after the official parser has found no fault in it. `chosen_archs` keeps
    only those CUDA architectures, for a build that is tried on one GPU."""
    Build.open(str(root))
    toml = tomllib.loads((root / "build.toml").read_text())
    if chosen_archs:
        for section in toml["kernel"].values():
            listed = section.get("cuda-capabilities", [])
            section["cuda-capabilities"] = [a for a in listed if a.split("+")[0] in chosen_archs]
    general = toml["general"]
    return Project(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        toml=toml,
        state=source_state(root),
        chosen_archs=chosen_archs,
    )
