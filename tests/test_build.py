"""build.toml, the build from it, and the variants that it left in build/."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from rich.progress import Progress

import abi
import build
import project
import toolchain

SOURCES = (".h", ".cpp", ".cu", ".cuh")


@pytest.fixture(scope="module")
def proj() -> project.Project:
    return project.load()


# build.toml


def test_official_parser_reads_it():
    assert {
        str(b).rsplit(".")[-1].lower() for b in Build.open(str(project.ROOT)).general.backends
    } == {
        "cpu",
        "cuda",
    }


def test_lists_every_source_file_and_no_other(proj):
    folders = (proj.root / "kernel_src", proj.root / "torch-ext")
    files = {f.relative_to(proj.root).as_posix() for d in folders for f in d.rglob("*")}
    files = {f for f in files if f.endswith(SOURCES)}
    # The official builder puts a file of its own in this one's place.
    files.remove("torch-ext/registration.h")
    assert set(proj.listed("cpu")) | set(proj.listed("cuda")) == files


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_lists_every_header_beside_what_includes_it(proj, backend):
    """The official builder copies only what a backend lists."""
    listed = set(proj.listed(backend)) | {"torch-ext/registration.h"}
    guard = "CUDA_KERNEL"
    for file in sorted(listed):
        text = (proj.root / file).read_text()
        if backend == "cpu":
            text = re.sub(rf"#ifdef {guard}\n.*?#endif", "", text, flags=re.DOTALL)
        for name in re.findall(r'#include "(.+)"', text):
            path = ((proj.root / file).parent / name).resolve().relative_to(proj.root)
            assert path.as_posix() in listed, f"{file} includes {name}"


def test_cuda_sections_split_the_architectures(proj):
    sections = [s["cuda-capabilities"] for s in proj.sections("cuda")]
    generic, packed = sections
    assert packed == ["10.0", "10.3"]
    assert generic == ["8.0", "8.6", "8.7", "8.9", "9.0", "11.0", "12.0", "12.1+PTX"]
    for source in proj.sources("cuda", ".cu"):
        flags = [f for f in proj.options("cuda")[source] if f.startswith("-gencode")]
        assert len(flags) == len(generic) + len(packed) + 1, "one each, and the PTX of one"


# The namespace


@pytest.mark.parametrize(
    "changed", ["kernel_src/params.h", "torch-ext/short_conv/ops.py", "build.toml"]
)
def test_namespace_follows_the_sources(tmp_path, changed):
    copy_sources(tmp_path)
    before = project.load(tmp_path).ops("cpu")
    (tmp_path / "torch-ext/short_conv/_ops.py").write_text("generated = True\n")
    assert project.load(tmp_path).ops("cpu") == before
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert project.load(tmp_path).ops("cpu") != before


# The checks of a built extension


def link(folder: Path, code: str) -> Path:
    """A shared library that asks for what code uses."""
    (folder / "bad.cpp").write_text(code)
    library = folder / "bad.abi3.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, folder / "bad.cpp"], check=True)
    return library


@pytest.fixture(scope="module")
def shims() -> set[str]:
    return abi.stable_shims(toolchain.torch_dir(), build.target_version(2, 10))


# A name that the finding must contain, and code that asks for it.
BAD = {
    "torch's C++": (
        "c10",
        "namespace c10 { int f(); }\nint g() { return c10::f(); }",
    ),
    "a method of torch's C++": (
        "at1T",
        "namespace at { struct T { int f() const; }; }\nint g(at::T* t) { return t->f(); }",
    ),
    "a shim of a later torch": (
        "torch_from_blob_v2",
        'extern "C" int torch_from_blob_v2();\nint g() { return torch_from_blob_v2(); }',
    ),
    "a private Python function": (
        "PyFrame_GetLocals",
        'extern "C" void* PyFrame_GetLocals(void*);\nvoid* g() { return PyFrame_GetLocals(0); }',
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_check_finds(tmp_path, shims, kind):
    name, code = BAD[kind]
    found = abi.violations(link(tmp_path, code), shims)
    assert len(found) == 1 and name in found[0], found


@pytest.mark.skipif("dlopen" not in toolchain.old_versions(), reason="this glibc is old itself")
def test_check_finds_a_new_glibc(tmp_path, shims):
    code = "#include <dlfcn.h>\nvoid* g() { return dlopen(nullptr, 0); }"
    found = abi.violations(link(tmp_path, code), shims)
    assert len(found) == 1 and "dlopen" in found[0], found
    old = toolchain.old_glibc_header(tmp_path)
    assert abi.violations(link(tmp_path, f'#include "{old}"\n{code}'), shims) == []


def test_check_passes_what_is_allowed(tmp_path, shims):
    code = 'extern "C" int aoti_torch_get_dim(void*);\nint g() { return aoti_torch_get_dim(0); }'
    assert abi.violations(link(tmp_path, code), shims) == []


# A build from start to end, of a package with one op


BINDING = """
#include <torch/csrc/stable/library.h>
#include "registration.h"

void mark(torch::stable::Tensor x) { (void)x; }

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, ops) { ops.def("mark(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("mark", TORCH_BOX(&mark)); }
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
BUILD_TOML = """
[general]
name = "short-conv"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]
[torch]
src = ["torch-ext/torch_binding.cpp", "kernel_src/compat_glibc.cpp"]
minver = "2.10"
stable-abi = { cpu = "2.10" }
[kernel.one]
backend = "cpu"
depends = ["torch"]
src = ["kernel_src/one.cpp"]
"""


def copy_sources(folder: Path) -> None:
    for name in project.STATE:
        source = project.ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)


def test_builds_again_only_what_changed_and_refuses_a_bad_symbol(tmp_path):
    (tmp_path / "torch-ext/short_conv").mkdir(parents=True)
    (tmp_path / "kernel_src").mkdir()
    shutil.copy(project.ROOT / "CMakeLists.txt", tmp_path)
    shutil.copytree(project.ROOT / "cmake", tmp_path / "cmake")
    for file in ("torch-ext/registration.h", "kernel_src/compat_glibc.cpp"):
        shutil.copy(project.ROOT / file, tmp_path / file)
    (tmp_path / "build.toml").write_text(BUILD_TOML)
    (tmp_path / "torch-ext/torch_binding.cpp").write_text(BINDING)
    one = tmp_path / "kernel_src/one.cpp"
    one.write_text("int one() { return 1; }\n")
    init = tmp_path / "torch-ext/short_conv/__init__.py"
    init.write_text("from ._ops import ops\n")

    def run() -> Path:
        with Progress(disable=True) as progress:
            name, *_ = build.build(project.load(tmp_path), "cpu", 2, progress)
        return tmp_path / "build" / name

    first = run()
    (library,) = first.glob("*.abi3.so")
    assert library.name == f"{project.load(tmp_path).ops('cpu')}.abi3.so"
    (compiled,) = tmp_path.glob(".cmake/cpu/**/one.cpp.o")
    time = compiled.stat().st_mtime_ns

    init.write_text("from ._ops import ops  # changed\n")
    assert run() == first
    (renamed,) = first.glob("*.abi3.so")
    assert renamed.name != library.name, "a Python change needs a namespace of its own"
    assert compiled.stat().st_mtime_ns == time, "and no new compilation of the kernels"

    one.write_text("namespace at { int one(); }\nint one() { return at::one(); }\n")
    with pytest.raises(build.Failed, match="_ZN2at3oneEv"):
        run()
    assert list(first.glob("*.abi3.so")) == [renamed], "a refused build leaves the last good one"


# What stands in build/


@pytest.fixture(params=["cpu_build", "cuda_build"])
def variant(request) -> Path:
    return request.getfixturevalue(request.param)


def test_metadata(proj, variant):
    metadata = Metadata.read_from_file(str(variant / "metadata.json"))
    assert (str(metadata.name), metadata.version) == (proj.name, proj.version)
    assert metadata.license == "Apache-2.0"
    assert (variant / f"{metadata.id}.abi3.so").is_file()
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, str(variant)))


def test_digest_notices_a_change(variant, tmp_path):
    copy = shutil.copytree(variant, tmp_path / variant.name)
    (copy / "__init__.py").write_text("changed = True\n")
    digest = Metadata.read_from_file(str(copy / "metadata.json")).digest
    with pytest.raises(Exception, match="__init__"):
        digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, str(copy)))


def test_layout(proj, variant):
    expected = {f.relative_to(proj.package) for f in proj.package.rglob("*.py")}
    expected |= {Path("_ops.py"), Path(proj.python_name, "__init__.py")}
    assert {f.relative_to(variant) for f in variant.rglob("*.py")} == expected


def test_size(variant):
    (library,) = variant.glob("*.abi3.so")
    assert library.stat().st_size < 8e6


# The machine code of the CUDA variant


@pytest.fixture(scope="module")
def cuda_library(proj, cuda_build) -> Path:
    archs = Metadata.read_from_file(str(cuda_build / "metadata.json")).backend.archs
    if archs != proj.archs("cuda"):
        pytest.skip(f"built with --archs for {' '.join(archs)} only")
    (library,) = cuda_build.glob("*.abi3.so")
    return library


def test_cubins_for_every_architecture(proj, cuda_library):
    files = len(proj.sources("cuda", ".cu"))
    wanted = sorted(arch.split("+")[0].replace(".", "") for arch in proj.archs("cuda"))
    listed = re.findall(r"\.sm_(\w+)\.cubin", toolchain.cuobjdump("--list-elf", cuda_library))
    assert sorted(listed) == sorted(wanted * files)
    ptx = re.findall(r"\.sm_(\w+)\.ptx", toolchain.cuobjdump("--list-ptx", cuda_library))
    assert ptx == ["121"] * files


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_90", "sm_120"])
def test_packed_fma_where_the_hardware_has_it(cuda_library, arch):
    count = toolchain.cuobjdump("-sass", "-arch", arch, cuda_library).count("FFMA2")
    assert (count > 0) == (arch in ("sm_100", "sm_103")), f"{count} packed FMAs in {arch}"


def test_no_kernel_spills(cuda_library):
    spilled = []
    for cubin in toolchain.cuobjdump("-res-usage", cuda_library).split("Fatbin elf code:")[1:]:
        arch = re.search(r"^arch = (\w+)", cubin, re.MULTILINE)[1]
        usage = re.findall(r"Function (\w+):\s*REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cubin)
        assert usage, f"no kernel for {arch}"
        spilled += [f"{arch} {name}" for name, stack, local in usage if int(stack) + int(local)]
    assert spilled == []
