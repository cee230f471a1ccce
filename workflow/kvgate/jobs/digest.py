"""What a stage's code is: the digest of the import closure of its modules. Reads the sources, imports nothing.

Comments, blank lines, formatting and docstrings are no code. Snakemake sees none of this by itself: a change in an
imported module is invisible to it. A package that looks for its own modules (`pkgutil.iter_modules(__path__)`) imports
them all. Standard library only.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
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
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _finds_its_own(node):
            names |= {f"{module}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            _drop_docstring(node)
    imported = tuple(sorted(n for n in names if n.split(".")[0] == PACKAGE and n != PACKAGE and _file(n)))
    return hashlib.sha256(dumped(tree).encode()).hexdigest(), imported


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, without nodes that have no fields, in another order; takes two thirds of the time."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for value in vars(node).values():
            if type(value) is list:
                todo += [x for x in value if isinstance(x, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                todo.append(value)


def dumped(tree: ast.AST) -> str:
    """ast.dump(tree), to the letter; takes two thirds of the time."""
    parts: list[str] = []

    def write(value: object) -> None:
        if isinstance(value, ast.AST):
            kind, before = type(value), "("
            parts.append(kind.__name__)
            for name in kind._fields:
                part = getattr(value, name, None)
                if part is None and getattr(kind, name, ...) is None:
                    continue
                parts.append(f"{before}{name}=")
                write(part)
                before = ", "
            parts.append("()" if before == "(" else ")")
        elif isinstance(value, list):
            parts.append("[")
            for n, part in enumerate(value):
                if n:
                    parts.append(", ")
                write(part)
            parts.append("]")
        else:
            parts.append(repr(value))

    write(tree)
    return "".join(parts)


def _finds_its_own(call: ast.Call) -> bool:
    """Whether it is `pkgutil.iter_modules(__path__)`."""
    return ast.unparse(call.func).endswith("iter_modules") and [ast.unparse(x) for x in call.args] == ["__path__"]


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
