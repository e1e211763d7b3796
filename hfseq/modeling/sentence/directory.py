"""The files of sentence-transformers in a model directory.

A model is a chain of modules, which `modules.json` lists. The first module is the transformer. The
formats of sentence-transformers 2 to 5 and of version 6 differ in the paths of the module classes
and in the names of a few settings. This file reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.checkpoints import files
from hfseq.checkpoints.config import fetcher
from hfseq.errors import CheckpointError, parse_json, write_atomically

#: The names of the file with the settings of the transformer. The first one is current.
TRANSFORMER_SETTINGS = (
    "sentence_bert_config.json",
    *(
        f"sentence_{name}_config.json"
        for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
SETTINGS = "config_sentence_transformers.json"
MODULES = "modules.json"
#: The values of ``model_type``. A missing value stands for the first one.
KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
#: Module classes that contain the transformer.
TRANSFORMERS = ("Transformer", "MLMTransformer", "ColBERT")
#: Module classes that select the modules of queries or documents.
ROUTERS = ("Router", "Asym")
#: Keys of `config_sentence_transformers.json` that hfseq writes itself.
OWN_SETTINGS = (
    *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"),
    *("truncate_dim", "activation_fn", "max_active_dims"),
)


@dataclass(frozen=True)
class Module:
    """An entry of modules.json, or a module of a router.

    Attributes:
        class_name: Name of the class without its Python module.
        folder: The folder of its files, relative to the model directory.
        settings: The content of its config.json.
    """

    class_name: str
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SentenceDirectory:
    """The small files of a model directory or repository.

    Attributes:
        source: The directory or repository, for messages.
        fetch: Maps the name of a file to its local path, or to `None`.
        modules: The modules in order. If one of them is a router, these are the modules of
            documents.
        query_modules: The modules of queries if there is a router, otherwise `None`.
        default_route: The route of texts that are neither queries nor documents.
        settings: The content of ``config_sentence_transformers.json``.
        transformer: The settings of the transformer.
    """

    source: str
    fetch: files.Fetch
    modules: Sequence[Module] = ()
    query_modules: Sequence[Module] | None = None
    default_route: str = "document"
    settings: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, source: str, download: Mapping[str, Any]) -> SentenceDirectory:
        """Reads the files.

        Args:
            source: A directory or repository.
            download: Options of downloads.

        Raises:
            CheckpointError: A file is not valid.
        """
        directory = cls(source, fetcher(source, download))
        listed: Any = directory.load(MODULES) or []
        modules = [directory.module(str(m["type"]), str(m.get("path", ""))) for m in listed]
        query_modules, default_route = None, "document"
        routers = [n for n, module in enumerate(modules) if module.class_name in ROUTERS]
        if len(routers) == 1:
            (number,) = routers
            before, after = modules[:number], modules[number + 1 :]
            document, query, default_route = directory.routes(modules[number].folder)
            modules = [*before, *document, *after]
            query_modules = [*before, *query, *after]
        transformer = directory.transformer_settings(modules[0].folder if modules else "")
        settings = directory.load(SETTINGS)
        return cls(
            source,
            directory.fetch,
            modules,
            query_modules,
            default_route,
            settings=settings,
            transformer=transformer,
        )

    def load(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file, or an empty dict if it does not exist."""
        path = self.fetch(name)
        return {} if path is None else read_json(path)

    def transformer_settings(self, folder: str) -> dict[str, Any]:
        """Returns the settings of the transformer in a folder."""
        names = [f"{folder}/{name}".lstrip("/") for name in TRANSFORMER_SETTINGS]
        return next(filter(None, map(self.load, names)), {})

    def for_queries(self) -> SentenceDirectory:
        """Returns the description of the model of queries alone, in a directory with a router."""
        assert self.query_modules is not None
        settings = self.transformer_settings(self.query_modules[0].folder)
        return replace(self, modules=self.query_modules, query_modules=None, transformer=settings)

    def module(self, class_path: str, folder: str) -> Module:
        """Returns the module of a class path and a folder."""
        class_name = class_path.rsplit(".", 1)[-1]
        is_transformer = class_name in TRANSFORMERS
        settings = {} if is_transformer else self.load(f"{folder}/config.json".lstrip("/"))
        return Module(class_name, folder, settings)

    def routes(self, folder: str) -> tuple[list[Module], list[Module], str]:
        """Returns the modules of the document route and of the query route, and the default route.

        Raises:
            CheckpointError: The router has different routes.
        """
        prefix = f"{folder}/" if folder else ""
        config = self.load(f"{prefix}router_config.json") or self.load(f"{prefix}config.json")
        try:
            structure, types = config["structure"], config["types"]
            if set(structure) != {"query", "document"}:
                raise CheckpointError(
                    f"the router of '{self.source}' has the routes {', '.join(structure)} "
                    "(supported: query and document)"
                )
            document, query = (
                [self.module(str(types[name]), prefix + name) for name in structure[route]]
                for route in ("document", "query")
            )
            parameters = config.get("parameters") or {}
            default_route = parameters.get("default_route") or next(iter(structure))
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                f"the router of '{self.source}' has no valid router_config.json: {error!r}"
            ) from error
        return document, query, str(default_route)

    @property
    def model_type(self) -> str:
        """The model type, which is an element of ``KINDS`` or an unknown name."""
        model_type = self.settings.get("model_type")
        if model_type == "ColBERT":  # written by PyLate
            return "MultiVectorEncoder"
        if model_type is not None:
            return str(model_type)
        is_sparse = any(module.class_name == "SpladePooling" for module in self.modules)
        return "SparseEncoder" if is_sparse else "SentenceTransformer"

    def unsupported(self, module: Module, supported: Sequence[str]) -> CheckpointError:
        """Returns the error for a module that the model type does not support."""
        return CheckpointError(
            f"modules.json of '{self.source}' has the unsupported module {module.class_name} "
            f"(supported by a {self.model_type}: {', '.join(supported)})"
        )

    def tensors(self, folder: str) -> tuple[str, dict[str, np.ndarray]]:
        """Returns the path of the weights of a module, and its tensors.

        Raises:
            CheckpointError: The folder has no weights.
        """
        names = (files.SAFETENSORS, files.TORCH_BIN)
        paths = (self.fetch(f"{folder}/{name}".lstrip("/")) for name in names)
        path = next(filter(None, paths), None)
        if path is None:
            raise CheckpointError(f"'{self.source}': {folder} has no {' or '.join(names)}")
        tensors = files.open_file(path).tensors
        return path, {name: tensor.read(...) for name, tensor in tensors.items()}


def read_json(path: str | Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        CheckpointError: The file is not valid JSON, or an object in it has a duplicate key.
    """
    try:
        return parse_json(Path(path).read_bytes(), unique_keys=True)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def write_json(folder: Path, contents: Mapping[str, Any]) -> None:
    """Writes JSON files by their names in ``folder``."""
    for name, value in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, json.dumps(value, indent=2) + "\n")


def router_json(
    routes: Mapping[str, Mapping[str, str]], default_route: str = "document"
) -> dict[str, Any]:
    """Returns the content of router_config.json.

    Args:
        routes: For each route, the folders of its modules and the paths of their classes. The
            folder "" is the directory of the router itself.
        default_route: The route of texts that are neither queries nor documents.
    """
    types = {folder: path for modules in routes.values() for folder, path in modules.items()}
    return {
        "types": {folder: f"sentence_transformers.{path}" for folder, path in types.items()},
        "structure": {route: list(modules) for route, modules in routes.items()},
        "parameters": {"default_route": default_route, "allow_empty_key": True},
    }


def modules_json(class_paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the content of modules.json for a list of module classes.

    The first module is in the model directory itself.
    """
    return [
        {
            "idx": index,
            "name": str(index),
            "path": module_folder(index, class_path),
            "type": f"sentence_transformers.{class_path}",
        }
        for index, class_path in enumerate(class_paths)
    ]


def module_folder(index: int, class_path: str) -> str:
    """Returns the folder of a module."""
    return f"{index}_{class_path.rsplit('.', 1)[-1]}" if index else ""


def version_entries(sentence_transformers: str) -> dict[str, str]:
    """Returns the entry ``__version__`` of ``config_sentence_transformers.json``."""
    return {
        "sentence_transformers": sentence_transformers,
        "transformers": version("transformers"),
        "pytorch": "",
    }
