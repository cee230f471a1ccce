"""What a stage's code is: the digest of the import closure of its modules. Reads the sources, imports nothing.

Comments, blank lines, formatting and docstrings are no code. Snakemake sees none of this by itself: a change in an
imported module is invisible to it. A package that looks for its own modules (`pkgutil.iter_modules(__path__)`) imports
them all. Standard library only.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "kvgate"
_ROOT = Path(__file__).parents[1]


def code_digest(roots: Iterable[str]) -> str:
    """12 hex digits of the sources of `roots` (dotted names below kvgate) and all that they import from kvgate.

    Raises ValueError on a root that does not exist.
    """
    total = hashlib.sha256()
    for module in sorted(closure(roots)):
        total.update(f"{module}={_source(module)[0]}\n".encode())
    return total.hexdigest()[:12]


def closure(roots: Iterable[str]) -> dict[str, Path]:
    """The files of `roots` and of all that they import from kvgate, by dotted name.

    Raises ValueError on a root that does not exist.
    """
    todo, found = list(roots), {}  # type: list[str], dict[str, Path]
    for root in todo:
        if _file(root) is None:
            raise ValueError(f"module: got {root!r}, which is not in the package")
    while todo:
        module = todo.pop()
        file = _file(module)
        if module not in found and file is not None:
            found[module] = file
            todo.extend(_source(module)[1])
    return found


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages as installed now, without a local label such as +cpu; `missing` where one is not."""
    return {name: _version(name) for name in packages}


def locked(lock: Path, packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages as a lock file of `name==version` lines has them. Raises ValueError on a missing one."""
    pins = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        name, _, pinned = line.partition("==")
        pins[_normal(name)] = pinned.strip()
    missing = [name for name in packages if _normal(name) not in pins]
    if missing:
        raise ValueError(f"{lock.name}: lacks {', '.join(missing)}")
    return {name: pins[_normal(name)] for name in packages}


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


@cache
def _version(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "missing"


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]]:
    """The digest of one module's code and the names of the kvgate modules that it imports."""
    file = _file(module)
    assert file is not None
    tree = ast.parse(file.read_bytes())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _finds_its_own(node):
            names |= {f"{module}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            _drop_docstring(node)
    imported = tuple(sorted(n for n in names if n.split(".")[0] == PACKAGE and n != PACKAGE and _file(n)))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported


def _finds_its_own(call: ast.Call) -> bool:
    """Whether it is `pkgutil.iter_modules(__path__)`."""
    named = isinstance(call.func, ast.Attribute) and call.func.attr == "iter_modules"
    return named and [ast.unparse(x) for x in call.args] == ["__path__"]


def _drop_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]


@cache
def _file(module: str) -> Path | None:
    base = _ROOT.joinpath(*module.split(".")[1:])
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if module.startswith(PACKAGE + ".") and file.is_file():
            return file
    return None
