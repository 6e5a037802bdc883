"""Builds the package's variants into build/, from build.toml, without Nix."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

import abi
import package
import project
import toolchain

STEP = re.compile(r"\[(\d+)/(\d+)\] ")
console = Console(stderr=True)


class Failed(RuntimeError):
    """A step of the build failed; the text is its output."""


def configuration(proj: project.Project, backend: str, jobs: int, nvcc: Path | None) -> str:
    """The CMake variables and per-source options of one variant."""
    tree, (major, minor) = proj.tree(backend), proj.stable_abi(backend)
    definitions = [f"TORCH_TARGET_VERSION={target_version(major, minor)}"]
    definitions += ["CUDA_KERNEL", "USE_CUDA=1"] if nvcc else ["CPU_KERNEL"]
    values = {
        "BACKEND": backend,
        "OPS": proj.ops(backend),
        "TORCH": toolchain.torch_dir(),
        "SOURCES": ";".join(proj.sources(backend, ".cpp")),
        "DEFINITIONS": ";".join(definitions),
        "OLD_GLIBC": toolchain.old_glibc_header(tree),
    }
    if nvcc:
        toolkit = toolchain.toolkit_dir(nvcc)
        values["CUDA_SOURCES"] = ";".join(proj.sources(backend, ".cu"))
        values["CUDA_INCLUDE"] = toolkit / "include"
        values["JOBS"] = jobs
        values["CUDART"] = toolchain.portable_cudart(toolkit, tree)
    lines = [f'set({name} "{value}")' for name, value in values.items()]
    for source, flags in proj.options(backend).items():
        if flags:
            lines.append(
                f'set_property(SOURCE {source} PROPERTY COMPILE_OPTIONS "{";".join(flags)}")'
            )
    return "\n".join(lines) + "\n"


def target_version(major: int, minor: int) -> str:
    return f"0x{major << 56 | minor << 48:016x}"


def run(command: list, progress: Progress, **environment: str) -> None:
    """Runs a command, shows ninja's steps as they finish, and keeps its output for a failure."""
    # cmake and ninja of this interpreter's environment come before the system's.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    log = []
    task = progress.add_task(str(command[0]), total=None)
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path, "NINJA_STATUS": "[%f/%t] ", **environment},
    ) as process:
        for line in process.stdout:
            log.append(line)
            if step := STEP.match(line):
                done, total = map(int, step.groups())
                name = Path(line.split()[-1]).name.removesuffix(".o")
                progress.update(task, completed=done, total=total, description=name)
    progress.remove_task(task)
    if process.returncode:
        raise Failed("".join(log))


def compile_variant(proj: project.Project, backend: str, jobs: int, progress: Progress) -> Path:
    """Compiles and links what has changed, and returns the checked, unstripped extension."""
    tree = proj.tree(backend)
    tree.mkdir(parents=True, exist_ok=True)
    nvcc = toolchain.find_nvcc() if backend == "cuda" else None
    config = tree / "config.cmake"
    text = configuration(proj, backend, jobs, nvcc)
    if not (config.exists() and config.read_text() == text and (tree / "build.ninja").exists()):
        config.write_text(text)
        command = ["cmake", "-G", "Ninja", "-S", proj.root, "-B", tree, f"-DCONFIG={config}"]
        environment = {}
        if nvcc:
            # CMake links a program to learn about nvcc, which from pip does not find its libraries.
            command += [f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_COMPILER_FORCED=ON"]
            cudart = toolchain.find_cudart(toolchain.toolkit_dir(nvcc))
            environment["LIBRARY_PATH"] = str(cudart.parent)
        run(command, progress, **environment)
    library = tree / f"{proj.ops(backend)}.abi3.so"
    for old in set(tree.glob("*.abi3.so")) - {library}:
        old.unlink()
    run(["ninja", "-C", tree, f"-j{jobs}"], progress)
    shims = abi.stable_shims(toolchain.torch_dir(), target_version(*proj.stable_abi(backend)))
    if found := abi.violations(library, shims):
        raise Failed("\n".join([f"{library.name} would not load everywhere:", *found]))
    return library


def build(proj: project.Project, backend: str, jobs: int, progress: Progress) -> tuple[str, ...]:
    """Builds one variant and returns its row of the closing table."""
    start = time.monotonic()
    library = compile_variant(proj, backend, jobs, progress)
    toolkit = toolchain.nvcc_release(toolchain.find_nvcc()) if backend == "cuda" else ""
    built = package.assemble(proj, backend, proj.variant(backend, toolkit), library)
    size = (built / library.name).stat().st_size / 1e6
    archs = " ".join(proj.archs(backend)) or "-"
    return built.name, f"{size:.2f} MB", archs, f"{time.monotonic() - start:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["cpu", "cuda", "all"])
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--archs", nargs="+", default=[], help="only these, such as 9.0")
    args = parser.parse_args()
    proj = project.load(chosen_archs=tuple(args.archs))
    if args.archs and len(proj.archs("cuda")) != len(args.archs):
        parser.error(f"--archs must be in build.toml, got {' '.join(args.archs)}")
    table = Table(Column("variant", no_wrap=True), "size", "archs", "seconds")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for backend in ["cpu", "cuda"] if args.backend == "all" else [args.backend]:
                progress.console.print(f"building {backend}")
                table.add_row(*build(proj, backend, args.jobs, progress))
    except (Failed, toolchain.Missing) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
