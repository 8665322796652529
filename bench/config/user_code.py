"""Loads and lists a user's own code: classes that a setting names by import path, and a training script's files.

An import path is MODULE:NAME (my_pkg.my_model:Net) or FILE.py:NAME (my_model.py:Net, from the user's folder). Settings
that accept one: model.arch, optim.name, optim.schedule.name, data.source, instruments.NAME.class.

The sources in and below the folder of a training script (script=PATH) are read, hashed and kept. The script finds
everything else there (data, pictures, large files) through links, and it is not part of the run's identity.
"""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.base.paths import CODE, REPO, user_path, working_folder

OURS = ("bench", "models", "speedrun_bench")  # names of this program's modules, which a user's module cannot have
CLASS = "class"  # the setting that names the class of a user's own instrument
KERNELS = (".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".ptx")  # sources that a Python file may build and load
SCRIPT_MAIN = ":__main__"  # PATH:__main__ names a script, as PATH:NAME names a class
WITHIN = "/./"  # ROOT/./FILE:__main__ names a script with all the code below ROOT (script.root)
SUFFIXES: tuple[str, ...] = (".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".ptx", ".sh")
# of a program that is no Python file
OTHERS: tuple[str, ...] = (".jl", ".r", ".R", ".rs", ".go", ".lua", ".mojo", ".zig", ".java", ".js", ".ts", ".swift")
OTHERS += (".pl", ".rb", ".hs", ".f90", ".m", ".cs", ".kt", ".ml", ".scala", ".cl", ".metal", ".pyx")
PROGRAMS = OTHERS + tuple(suffix for suffix in SUFFIXES if suffix != ".sh")  # shell files may hold secrets
TEXTS = (".json", ".toml", ".yaml", ".yml", ".txt", ".cfg")  # beside the script only: perhaps its settings
# Folders of outputs and environments: neither part of the identity nor linked.
OUTPUTS = ("logs", "log", "out", "outputs", "results", "runs", "wandb", "checkpoints", "__pycache__", "node_modules")
APART = ("data", "records")  # linked, but not part of the identity: data, and runs of others
REVISIONS = "revisions"  # parent of script.rev's folders, whose links lead to what git does not track: no sources
OUTPUT = "SPEEDRUN_OUTPUT"  # variable of a race's processes: outputs() of the race
RELATIVE = "a record keeps the name and no private path: write it relative to the current folder"
MAX_FILES, MAX_DEPTH = 400, 4  # limits of the sources of a script without a root
MAX_ROOT_FILES = 4000  # sources below a root; more are refused
MAX_BYTES = 2**20  # size of a source file
_NAMES = ", ".join((*APART, *OUTPUTS))
_FOLDERS = f"hidden folders, environments, results folders, and those folders {_NAMES} that are no package"
EXCLUDED = (
    f"files but {', '.join(SUFFIXES)} (and {', '.join(TEXTS)} beside the script), of more than {MAX_BYTES} bytes, "
    f"the {MAX_FILES + 1}th and later ones, folders deeper than {MAX_DEPTH}, {_FOLDERS}"
)
_BELOW_ROOT = f"{', '.join(SUFFIXES + TEXTS)} (for a program that is no Python file {', '.join(OTHERS)} too)"
EXCLUDED_BELOW_ROOT = f"files but {_BELOW_ROOT}, of more than {MAX_BYTES} bytes, {_FOLDERS}"


def is_import_path(name: Any) -> bool:
    """Returns whether a setting's value names a class of the user's own."""
    return isinstance(name, str) and ":" in name


def short(name: str) -> str:
    """Shortens my_model.py:Net to Net, and my_optim.py:Config to my_optim; returns any other name unchanged."""
    module, _, last = name.rpartition(":")
    return re.split(r"[./]", module.removesuffix(".py"))[-1] if module and last == "Config" else last


def import_paths(config: dict[str, Any]) -> list[str]:
    """Returns the import paths in a config's nested values, sorted."""
    if config.get("script"):
        return []
    optim = config["optim"]
    schedule = optim.get("schedule") or {}
    names = [config["model"]["arch"], config["data"]["source"], optim["name"], schedule.get("name")]
    names += [settings[CLASS] for settings in config["instruments"].values() if CLASS in (settings or {})]
    return sorted({name for name in names if is_import_path(name)})


# ---- import

_copied: Path | None = None  # in a rank, the folder with copies of the user's sources


def use_copies(folder: Path | str) -> None:
    """Makes this process import the user's own code from this folder of copies, "own/" of a run."""
    global _copied
    _copied = Path(folder)


def copies() -> Path | None:
    """Returns the folder given to use_copies(), or None."""
    return _copied


def load(where: str, import_path: str, base: type = object) -> Any:
    """Returns the class, base or one that extends it, that an import path names. where: the setting.

    Raises ValueError if it cannot be loaded, or is no such class.
    """
    module_name, _, name = import_path.partition(":")
    if not name.isidentifier() or (os.sep in module_name and not module_name.endswith(".py")):
        raise ValueError(f"{where}={import_path}: write my_model.py:Net, or my_package.my_model:Net")
    if os.path.isabs(os.path.expanduser(module_name)):
        raise ValueError(f"{where}={import_path}: {RELATIVE}")
    try:
        module = _module(module_name)
    except Exception as error:  # whatever the user's file raises while it is imported
        raise ValueError(f"{where}={import_path}: {_import_failure(module_name, error)}") from error
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        extends = "" if base is object else f" that extends {base.__module__}.{base.__name__}"
        has = f"has no class {name}{extends}; it has {', '.join(classes) or 'none'}"
        raise ValueError(f"{where}={import_path}: {module_name} {has}")
    return loaded


def _module(name: str) -> ModuleType:
    path = _file(name)
    folders = [Path(working_folder()), *([] if path is None else [path.parent])]
    if _copied is not None:
        path, folders = path and _copy_of(path, _copied / path.name), [_copy_of(folder, _copied) for folder in folders]
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.insert(1, folder)  # after this program's own folder, before installed packages
    if path is None:
        return importlib.import_module(name)
    known_as = "own_" + re.sub(r"\W", "_", name)
    if known_as not in sys.modules:
        spec = importlib.util.spec_from_file_location(known_as, path)
        assert spec is not None and spec.loader is not None  # its name ends in .py
        sys.modules[known_as] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[known_as]
            raise
    return sys.modules[known_as]


def _copy_of(path: Path, otherwise: Path) -> Path:
    """Returns the copy of a path in the user's folder; `otherwise` for a path elsewhere."""
    assert _copied is not None
    return _copied / path.relative_to(working_folder()) if path.is_relative_to(working_folder()) else otherwise


def _file(module_name: str) -> Path | None:
    """Returns the path if the name is a file's, or None if it is a module's dotted name."""
    is_file = module_name.endswith(".py") or os.sep in module_name
    return Path(os.path.normpath(user_path(module_name))) if is_file else None


def _import_failure(module_name: str, error: Exception) -> str:
    file = _file(module_name)
    if isinstance(error, FileNotFoundError) and file is not None and not file.exists():
        return f"there is no file {file}"
    why = f"{type(error).__name__}: {error}"
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing.partition(".")[0] in OURS:
        why += f"; {missing.partition('.')[0]} is the harness's own package here: give yours another name"
    if "no known parent package" in str(error):
        why += "; a file alone has none: write my_package.my_model:NAME instead of the file"
    return f"cannot be imported: {why}{line_of(error)}"


def line_of(error: BaseException) -> str:
    """Returns " (my_model.py, line 12)", the innermost line of the traceback in the user's folder; "" if none is."""
    place, frame = "", error.__traceback__
    folders = [Path(folder) for folder in (_copied, working_folder()) if folder]
    while frame is not None:
        path = Path(frame.tb_frame.f_code.co_filename)
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder and "site-packages" not in path.parts and not any(map(path.is_relative_to, (REPO, CODE))):
            place = f" ({path.relative_to(folder)}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return place


# ---- source files, found without importing them, because every launch lists them


def sources(import_paths: Iterable[str]) -> dict[str, Path]:
    """Returns {"own/my_model.py": its path} of the named files and of all the user's modules that they import, sorted.

    The user's modules are those in their folder, beside the named file, or in the named package. Imports by a computed
    name are not seen; a kernel's source is, if its file name appears in the Python file. A training script
    (script=PATH) gives {"script/train_gpt.py": its path}, as script_sources() returns.
    """
    files: dict[str, Path] = {}
    for import_path in import_paths:
        if import_path.endswith(SCRIPT_MAIN):
            files |= script_sources(*script_of(import_path))
            continue
        name = import_path.partition(":")[0]
        path = _file(name)
        roots = [Root(Path(working_folder()))] + ([] if path is None else [Root(path.parent)])
        if path is None and not _files_of_module(name, roots):
            top = name.partition(".")[0]
            spec = importlib.util.find_spec(top)  # the first part alone, so that nothing is imported
            folders = list(spec.submodule_search_locations or ()) if spec else []
            roots = [Root(Path(folders[0]).parent, top)] if folders else []
        waiting = _files_of_module(name, roots) if path is None else [path]
        while waiting:
            file = waiting.pop()
            base = next((root.folder for root in roots if file.is_relative_to(root.folder)), file.parent)
            key = f"own/{file.relative_to(base).as_posix()}"
            if key not in files and file.is_file():
                files[key] = file
                waiting += _named_in(file, base, roots) if file.suffix == ".py" else []
    return dict(sorted(files.items()))


def used_by_script(starts: Iterable[str], names: Mapping[str, Path], opened: Iterable[Path] = ()) -> dict[str, str]:
    """Returns {name: why} of those sources of a script (script_sources()) that it uses, sorted.

    starts are the script itself or the sources that a command names; without any, all programs below the root. Any
    other source is used if the script opened it while it ran (`opened`), or if a used one imports it or contains its
    file name, as code that starts a program or a compiler does.
    """
    by_path = {path: name for name, path in names.items()}
    why = dict.fromkeys(starts, "the script") or {name: "its root's" for name in names if name.endswith(PROGRAMS)}
    waiting = [names[name] for name in why]
    folders = {path.parents[name.count("/") - 1] for name, path in names.items()}
    root, roots = min(folders), [Root(folder) for folder in (*folders, *{path.parent for path in waiting})]
    for path in opened:
        if path in by_path and by_path[path] not in why:
            why[by_path[path]] = "opened"
            waiting.append(path)
    while waiting:
        file = waiting.pop()
        imported = _named_in(file, root, roots) if file.suffix == ".py" else []
        in_text = set(re.findall(r"[\w.-]+", file.read_text(errors="replace")))
        for path, name in by_path.items():
            if name not in why and (path in imported or path.name in in_text):
                why[name] = f"named in {by_path[file].removeprefix('script/')}"
                waiting.append(path)
    return dict(sorted(why.items()))


@dataclass(frozen=True)
class Root:
    """A folder with modules of the user's: all of them, or only those of one installed package."""

    folder: Path
    only: str | None = None


def _files_of_module(name: str, roots: Iterable[Root]) -> list[Path]:
    """Returns the files that importing a dotted name reads, from the first root that has any of them."""
    parts = name.split(".")
    for root in roots:
        starts = [root.folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        files = [file for start in starts for file in (start / "__init__.py", start.with_suffix(".py"))]
        files = [file for file in files if file.is_file()]
        if files and parts[0] not in OURS and root.only in (None, parts[0]):
            return files
    return []


def _named_in(path: Path, base: Path, roots: Iterable[Root]) -> list[Path]:
    """Returns the user's files that a Python file imports, also inside functions, and the kernels that it names."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # importing the file reports it
        return []
    package, files = path.relative_to(base).parts[:-1], []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(KERNELS):
            files += [path.parent / node.value, Path(working_folder(), node.value)]
        files += [file for name in names for file in _files_of_module(name, roots)]
    return files


def script_of(import_path: str) -> tuple[Path, str, bool]:
    """Splits PATH:__main__ or ROOT/./FILE:__main__ into (folder, file name from there, whether folder is a root)."""
    text = import_path.removesuffix(SCRIPT_MAIN)
    root, within, name = text.rpartition(WITHIN)
    path = Path(os.path.normpath(user_path(root if within else text).absolute()))
    return (path, name, True) if within else (path.parent, path.name, False)


def script_sources(folder: Path, name: str, is_root: bool = False) -> dict[str, Path]:
    """Returns {"script/train_gpt.py": its path} of the sources in and below the folder of a script, sorted.

    name is the script's path from there, also of a program without a suffix; "" for a command that is no file there.
    EXCLUDED, or EXCLUDED_BELOW_ROOT, says what is omitted. Raises ValueError if a root has more than MAX_ROOT_FILES,
    or if a name is not UTF-8.
    """
    paths, is_revision = {name: folder / name} if name else {}, folder.parent.name == REVISIONS
    printed_to = outputs().split()
    for parent, folders, names in os.walk(folder):
        below = Path(parent).relative_to(folder)
        is_deep = not is_root and len(below.parts) >= MAX_DEPTH
        folders[:] = sorted(name for name in folders if not is_deep and is_searched(Path(parent, name)))
        suffixes = SUFFIXES if below.parts and not is_root else SUFFIXES + TEXTS
        suffixes += OTHERS if is_root and not name.endswith(".py") else ()
        for file in sorted(names):
            path = Path(parent, file)
            is_linked = is_revision and path.is_symlink() and os.path.isabs(os.readlink(path))
            if (
                path.suffix in suffixes
                and (is_root or len(paths) < MAX_FILES)
                and not is_linked
                and _is_source(path, printed_to)
            ):
                paths[(below / file).as_posix()] = path
        if len(paths) > MAX_ROOT_FILES:
            raise ValueError(f"script.root={folder}: holds more than {MAX_ROOT_FILES} sources: give the program's own")
    for path in paths.values():
        try:
            str(path).encode()
        except UnicodeEncodeError:  # no record could name it
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise ValueError(f"{shown}: its name is not UTF-8, and a record names all sources: rename it") from None
    return {f"script/{name}": paths[name] for name in sorted(paths)}


def outputs() -> str:
    """Returns "device:inode" of the files to which the user's command prints, which grow while it runs: no sources."""
    if OUTPUT in os.environ:
        return os.environ[OUTPUT]
    states: list[os.stat_result] = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            states.append(os.fstat(descriptor))
    return " ".join(f"{state.st_dev}:{state.st_ino}" for state in states if stat.S_ISREG(state.st_mode))


def is_searched(folder: Path) -> bool:
    """Returns whether the sources in this folder are part of a script's identity."""
    return (folder.name not in APART or _is_package(folder)) and is_linked(folder) and not folder.is_symlink()


def is_linked(path: Path) -> bool:
    """Returns whether the script may find this path: not the outputs of earlier runs, which it would overwrite.

    A results folder of any name is such an output: a run that was killed leaves copies of the sources in it.
    """
    if path.name.startswith("."):
        return False
    if not path.is_dir() or _is_package(path):
        return True
    is_output = path.name in OUTPUTS or path.name.startswith("out-")  # nanoGPT's out-shakespeare-char
    return not is_output and not any((path / name).exists() for name in ("pyvenv.cfg", "ledger.jsonl"))


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _is_source(path: Path, printed_to: Container[str]) -> bool:
    """Returns whether it is a small regular file; one of TEXTS that the user's command prints to is none."""
    try:
        state = path.stat()
    except OSError:
        return False
    is_output = path.suffix in TEXTS and f"{state.st_dev}:{state.st_ino}" in printed_to
    return stat.S_ISREG(state.st_mode) and state.st_size <= MAX_BYTES and not is_output
