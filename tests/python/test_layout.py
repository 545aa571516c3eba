"""The house's own rules: dependencies one way, the stub true of the module, versions refused."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import dmuon
from dmuon import _C

ROOT = Path(__file__).resolve().parents[2]


def sources(folder):
    return [p for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cpp")]


def test_backend_never_includes_optim_and_neither_includes_python():
    for path in sources("backend"):
        assert "dmuon/optim" not in path.read_text(), path
    for path in sources("backend") + sources("optim"):
        text = path.read_text()
        assert not re.search(r"#include <(Python\.h|pybind11|torch/csrc/utils/pybind)", text), path


def test_the_stub_names_what_the_extension_has():
    stub = ast.parse((ROOT / "bindings/dmuon/_C.pyi").read_text())

    def public(names):
        return {n for n in names if not n.startswith("_")}

    declared = {n.name: n for n in stub.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert public(declared) == public(vars(_C))
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            members = {
                m.name if isinstance(m, (ast.FunctionDef, ast.ClassDef)) else m.target.id
                for m in node.body
                if isinstance(m, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign))
            }
            assert public(members) == public(vars(getattr(_C, name))), name


def test_everything_public_is_documented():
    for name in dmuon.__all__:
        thing = getattr(dmuon, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            if thing.__module__.startswith("dmuon._C"):
                continue
            assert inspect.getdoc(thing), name


def test_another_torch_minor_is_refused_with_both_versions():
    code = textwrap.dedent(
        """
        import torch
        torch.__version__ = "1.13.0"
        try:
            import dmuon
        except ImportError as error:
            assert "1.13.0" in str(error) and BUILT in str(error), error
        else:
            raise SystemExit("imported")
        """
    )
    from dmuon._build_info import TORCH_VERSION

    subprocess.run([sys.executable, "-c", f"BUILT = {TORCH_VERSION!r}\n{code}"], check=True)
