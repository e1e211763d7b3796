"""The files of sentence-transformers in a model directory.

A model consists of modules that are applied one after the other. `modules.json` lists them. The
first module is the transformer. The format of sentence-transformers 6 differs from that of versions
2 to 5 in the paths of module classes and in the names of a few settings. Both formats are read.
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

#: Possible names of the file with the settings of the transformer. The first is the current name.
TRANSFORMER_SETTINGS = (
    "sentence_bert_config.json",
    *(
        f"sentence_{name}_config.json"
        for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
SETTINGS = "config_sentence_transformers.json"
MODULES = "modules.json"
#: The values of ``model_type``. If it is missing, the model is a SparseEncoder if it has a module
#: SpladePooling, otherwise a SentenceTransformer.
KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
#: Module classes that contain the transformer.
TRANSFORMERS = ("Transformer", "MLMTransformer", "ColBERT")
#: Module classes that contain separate modules for queries and documents.
ROUTERS = ("Router", "Asym")
#: Keys of `config_sentence_transformers.json` whose values hfseq stores in attributes.
OWN_SETTINGS = (
    *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"),
    *("truncate_dim", "activation_fn", "max_active_dims"),
)


@dataclass(frozen=True)
class Module:
    """An entry of modules.json, or a module of a router.

    Attributes:
        class_name: Name of the class, without the path of its Python module.
        folder: The folder with the files of the module, relative to the model directory.
        settings: The content of the config.json in this folder.
    """

    class_name: str
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SentenceDirectory:
    """The sentence-transformers files of a model, except the weights.

    Attributes:
        source: The directory or repository of the model.
        fetch: Function that returns the local path of a file by its name, or `None` if it does not
            exist.
        modules: The modules in order. If there is a router, its modules for documents are included.
        query_modules: As `modules`, with the router's modules for queries. `None` without a router.
        default_route: "query" or "document". The modules for texts that are encoded without a task.
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
        """Reads the files of a model.

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
        """Reads the settings of a module.

        Args:
            class_path: The path of the class of the module.
            folder: The folder of the module.
        """
        class_name = class_path.rsplit(".", 1)[-1]
        is_transformer = class_name in TRANSFORMERS
        settings = {} if is_transformer else self.load(f"{folder}/config.json".lstrip("/"))
        return Module(class_name, folder, settings)

    def routes(self, folder: str) -> tuple[list[Module], list[Module], str]:
        """Reads a router.

        Args:
            folder: The folder of the router.

        Returns:
            The modules for documents, the modules for queries, and the name of the default route.

        Raises:
            CheckpointError: The routes are not "query" and "document", or a file is not valid.
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
        """The model type. It may be a name that is not in ``KINDS``."""
        model_type = self.settings.get("model_type")
        if model_type == "ColBERT":  # written by PyLate
            return "MultiVectorEncoder"
        if model_type is not None:
            return str(model_type)
        is_sparse = any(module.class_name == "SpladePooling" for module in self.modules)
        return "SparseEncoder" if is_sparse else "SentenceTransformer"

    def unsupported(self, module: Module, supported: Sequence[str]) -> CheckpointError:
        """Returns the error for a module that hfseq does not support in this model type."""
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
            raise CheckpointError(
                f"'{self.source}': the folder '{folder}' of a module has no {' or '.join(names)}"
            )
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
    """Writes JSON files into ``folder``. The keys of ``contents`` are the names of the files."""
    for name, value in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, json.dumps(value, indent=2) + "\n")


def router_json(
    routes: Mapping[str, Mapping[str, str]], default_route: str = "document"
) -> dict[str, Any]:
    """Returns the content of router_config.json.

    Args:
        routes: For each route, maps the folders of its modules to the paths of their classes. The
            folder "" is the directory of the router itself.
        default_route: The name of the route for texts that are encoded without a task.
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
    """Returns the folder of a module from its position in the model and the path of its class."""
    return f"{index}_{class_path.rsplit('.', 1)[-1]}" if index else ""


def version_entries(sentence_transformers: str) -> dict[str, str]:
    """Returns the value of ``__version__`` in ``config_sentence_transformers.json``."""
    return {
        "sentence_transformers": sentence_transformers,
        "transformers": version("transformers"),
        "pytorch": "",
    }
