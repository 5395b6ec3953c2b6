"""The checks behind tests/test_architecture.py: syntax trees in, findings ("file:line: what") out. Imports nothing of minisgl.

Units: the files are counted in code lines: not blank, not a comment, not a documentation string.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

PRINTERS = ("cli", "bench")
"""The terminal programs, which may print."""

ONLY_IN = {
    "transformers": (),
    "huggingface_hub": ("models", "tokenizer"),
    "zmq": ("utils",),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "prometheus_client": ("server",),
    "prompt_toolkit": ("chat",),
    "rich": ("chat",),
    "triton": ("kernel",),
    "flashinfer": ("attention",),
    "flash_attn": ("attention",),
    "flash_attn_interface": ("attention",),
    "sgl_kernel": ("attention",),
    "pickle": (),
}
"""Library -> the packages of ours that may import it."""

OPTIONAL = ("triton", "flashinfer", "flash_attn", "flash_attn_interface", "sgl_kernel")
"""Libraries that are used where they are installed; they come with extras or with torch."""

TORCH_WHEN_USED = ("errors", "env", "core", "utils", "message", "tokenizer", "processes", "server", "chat", "cli", "__main__")
"""Packages of processes that start in a second: here torch is imported inside the function that needs it, if at all."""


@dataclass(frozen=True)
class Module:
    """One file of the package. `path` is relative to the package: `scheduler/io.py`."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def parts(self) -> tuple[str, ...]:
        """The module's dotted name below `minisgl`: ("scheduler", "io"); empty for the package itself."""
        parts = self.path.removesuffix(".py").split("/")
        return tuple(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return self.parts[0] if self.parts else ""

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """The numbers of the lines that hold code."""
        layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        text = self.source.splitlines()
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in layout:
                lines.update(n for n in range(token.start[0], token.end[0] + 1) if text[n - 1].strip())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return frozenset(lines)


def read_levels(markdown: str) -> dict[str, int]:
    """Package -> level, from the table whose rows read `| 3 | attention, moe | ... |`."""
    rows = re.findall(r"^\|\s*(\d+)\s*\|([^|]+)\|", markdown, re.MULTILINE)
    return {name.strip(" `"): int(level) for level, names in rows for name in names.split(",")}


def imports(module: Module) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether it stands at the module's top level) of each import, `import_module("…")` included."""
    top = {id(node) for statement in module.tree.body for node in _executed_on_import(statement)}
    here = ("minisgl", *module.parts)
    folder = here if module.path.endswith("__init__.py") else here[:-1]
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
            names = [".".join(folder) + texts[0] if texts[0].startswith(".") else texts[0]] if texts else []
        for name in names:
            yield node.lineno, name, id(node) in top


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what it holds, but neither function bodies nor `if TYPE_CHECKING` branches."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    typing_only = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else []
    for child in ast.iter_child_nodes(node):
        if child not in typing_only:
            yield from _executed_on_import(child)


def level_findings(module: Module, levels: dict[str, int]) -> Iterator[str]:
    """Imports of a higher level, of another package of the same level, or of a package without a level."""
    own = levels.get(module.package)
    if module.package and own is None:
        yield f"{module.path}:1: package {module.package!r} is not in the level table"
    for line, name, _ in imports(module):
        parts = name.split(".")
        if parts[0] != "minisgl" or len(parts) < 2 or parts[1] == module.package or parts[1] == "__version__":
            continue
        level = levels.get(parts[1])
        if level is None:
            yield f"{module.path}:{line}: imports {name}, which is not in the level table"
        elif level >= (-1 if own is None else own):
            yield f"{module.path}:{line}: level {own} imports {name} of level {level}"


def library_findings(module: Module, declared: frozenset[str]) -> Iterator[str]:
    """Imports of libraries from outside their place, of undeclared ones, and torch where it may be imported only when used."""
    for line, name, at_top in imports(module):
        library = name.split(".")[0]
        if library in ONLY_IN and module.package not in ONLY_IN[library]:
            yield f"{module.path}:{line}: {library} may be imported only in {', '.join(ONLY_IN[library]) or 'no module'}"
        elif library not in declared | {"minisgl", *OPTIONAL}:
            yield f"{module.path}:{line}: {library} is not a dependency in pyproject.toml"
        if library == "torch" and at_top and module.package in TORCH_WHEN_USED:
            yield f"{module.path}:{line}: torch is imported here only when used, inside the function"


def size_findings(module: Module, file_lines: int = 400, function_lines: int = 60, parameters: int = 8) -> Iterator[str]:
    """Files and functions of `file_lines`, `function_lines` or more code lines; functions with more than `parameters`.

    A Triton kernel's arguments are a launch's and cannot be grouped: they are not counted, nor the lines that they stand on; its body may
    be twice as long.
    """
    if len(module.code_lines) >= file_lines:
        yield f"{module.path}:1: {len(module.code_lines)} code lines; under {file_lines} is allowed"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            first = node.body[0].lineno if is_kernel else node.lineno
            length = len(module.code_lines & frozenset(range(first, (node.end_lineno or 0) + 1)))
            if length >= function_lines * (1 + is_kernel):
                yield f"{module.path}:{node.lineno}: {node.name} has {length} code lines; under {function_lines} is allowed"
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"])) + bool(node.args.vararg) + bool(node.args.kwarg)
            if count > parameters and not is_kernel:
                yield f"{module.path}:{node.lineno}: {node.name} has {count} parameters; {parameters} are allowed"


def style_findings(module: Module) -> Iterator[str]:
    """A module that does not open with a docstring; a print outside the terminal programs."""
    if not (ast.get_docstring(module.tree) or "").strip():
        yield f"{module.path}:1: a module opens with a docstring"
    if module.package in PRINTERS or module.path in PRINTERS:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.path}:{node.lineno}: print outside the terminal programs"
