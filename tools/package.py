"""The layout that the hub and `kernels` expect of one built variant."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

from project import Project

OPS = '''import torch

from . import {ops}

ops = torch.ops.{ops}


def add_op_namespace_prefix(op_name: str) -> str:
    """The op's qualified name, as torch.library wants it."""
    return f"{ops}::{{op_name}}"
'''

COMPAT = '''"""Makes `import {name}` work with the variant's directory on sys.path."""

import importlib.util
import sys
from pathlib import Path

_root = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location(
    __name__, _root / "__init__.py", submodule_search_locations=[str(_root)]
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
'''


def assemble(project: Project, backend: str, variant: str, library: Path) -> Path:
    """Writes build/<variant>/ beside its final place and swaps it in whole."""
    final = project.root / "build" / variant
    staged = final.with_name(f".{variant}")
    shutil.rmtree(staged, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", "_ops.py")
    shutil.copytree(project.package, staged, ignore=ignore)
    subprocess.run(["strip", "--strip-unneeded", "-o", staged / library.name, library], check=True)
    ops = project.ops(backend)
    (staged / "_ops.py").write_text(OPS.format(ops=ops))
    compat = staged / project.python_name
    compat.mkdir()
    (compat / "__init__.py").write_text(COMPAT.format(name=project.python_name))
    write_metadata(project, backend, staged, ops)
    shutil.rmtree(final, ignore_errors=True)
    staged.rename(final)
    return final


def write_metadata(project: Project, backend: str, folder: Path, ops: str) -> None:
    described: dict = {"type": backend}
    if archs := project.archs(backend):
        described["archs"] = archs
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, str(folder))
    metadata = {
        "name": project.name,
        "id": ops,
        "version": project.version,
        "license": project.license,
        "python-depends": [],
        "backend": described,
        "digest": {"algorithm": "sha256", "files": digest.files},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
