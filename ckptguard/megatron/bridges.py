"""Megatron-Bridge, one model family at a time. Runs in the asking process only.

``import megatron.bridge`` imports every family and the modelling code of transformers with it. Here the packages are
entered by their paths without running their ``__init__``, and only the module that registers the wanted architecture is
imported (megatron-bridge 0.6.2: ``@MegatronModelBridge.register_bridge(source=...)``).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptguard.core.errors import UnsupportedError

_REGISTRATION = re.compile(r"register_bridge\(\s*source\s*=\s*(?:\"([\w.]+)\"|(\w+))")
_SECOND_NAME = re.compile(r"register_bridge_implementation\(\s*source\s*=\s*\"(\w+)\"")
_OWN = {"MixtralForCausalLM": "ckptguard.megatron.mixtral_bridge"}  # what Bridge lacks
_SKIPPED = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.conversion")


@dataclass(frozen=True, slots=True)
class Family:
    """A registered architecture.

    Attributes:
        architecture: transformers' class name, as ``architectures`` in config.json has it.
        bridge: An instance of Bridge's class for it.
    """

    architecture: str
    bridge: Any


def root() -> Path | None:
    """Where Megatron-Bridge is installed; None if it is not."""
    found = importlib.util.find_spec("megatron")
    for place in (found.submodule_search_locations or ()) if found else ():
        if (Path(place) / "bridge" / "models").is_dir():
            return Path(place) / "bridge"
    return None


def architectures() -> dict[str, str]:
    """Module by architecture, of all that Bridge registers; read from its source, nothing is imported.

    Raises:
        UnsupportedError: Bridge is not installed.
    """
    place = root()
    if place is None:
        raise UnsupportedError(
            "megatron-bridge is not installed; names and transforms of Hugging Face tensors come from it",
            next_step="Install it with: pip install --no-deps megatron-bridge",
        )
    out: dict[str, str] = {}
    out |= _OWN
    for file in sorted((place / "models").rglob("*_bridge.py")):
        text = file.read_text()
        sources = [literal or _constant(text, name) for literal, name in _REGISTRATION.findall(text)]
        for source in [*sources, *_SECOND_NAME.findall(text)]:
            if source and source[0].isupper() and file.parent.name != "conversion":
                module = ".".join(file.relative_to(place.parents[1]).with_suffix("").parts)
                out.setdefault(source, module)
    return out


def _constant(text: str, name: str) -> str:
    """The string that a module-level constant holds; the name itself if it is none (an imported class)."""
    found = re.search(rf"^{name}\s*=\s*\"(\w+)\"", text, re.MULTILINE)
    return found[1] if found else name


def enter() -> None:
    """Makes Bridge's modules importable without its packages' ``__init__``, which would import every family.

    Bridge's base classes name two classes in annotations whose modules take seconds to import, and transformers looks up all
    files of all installed packages: here the first are placeholders and the second is not asked.
    """
    place = root()
    if place is None or _SKIPPED[0] in sys.modules:
        return
    for name in _SKIPPED:
        package = _Models(name) if name == "megatron.bridge.models" else ModuleType(name)
        package.__path__ = [str(Path(str(place), *name.split(".")[2:]))]
        sys.modules[name] = package
    sys.modules.setdefault("httpx._main", _AnyModule("httpx._main"))  # its command line, with rich and pygments
    asked, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, _Named
    try:
        importlib.import_module("transformers.utils.import_utils")
    finally:
        importlib.metadata.packages_distributions = asked
    _placeholder("megatron.bridge.models.hf_pretrained.causal_lm", "PreTrainedCausalLM")
    _placeholder("transformers.modeling_utils", "PreTrainedModel")
    sys.modules["transformers.masking_utils"] = _AnyModule(
        "transformers.masking_utils"
    )  # would import torch's compiler
    try:
        importlib.import_module("transformers.models.auto.auto_factory")
        importlib.import_module("megatron.bridge.models.conversion.model_bridge")
    finally:  # a family that builds on real modelling code gets the real ones
        del sys.modules["transformers.modeling_utils"], sys.modules["transformers.masking_utils"]


class _Named(dict[str, list[str]]):
    """A package's distribution has its name: enough for transformers to see what is installed."""

    def __missing__(self, name: str) -> list[str]:
        return [name]

    def get(self, name: str, default: Any = None) -> Any:
        return [name]


class _Models(ModuleType):
    """Has the mappings, which some families import from ``megatron.bridge.models`` itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("megatron.bridge.models.conversion.param_mapping"), name)


class _AnyModule(ModuleType):
    """Has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _placeholder(module: str, name: str) -> None:
    out: Any = ModuleType(module)
    setattr(out, name, type(name, (), {}))
    sys.modules[module] = out


def load(config: Mapping[str, Any]) -> Family:
    """Imports the family of a Hugging Face configuration; after ``enter``.

    Args:
        config: The content of config.json.

    Raises:
        UnsupportedError: Bridge does not know the architecture; names near ones.
    """
    known = architectures()
    named = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if not named:
        raise UnsupportedError("config.json names no architecture", next_step='Add "architectures": ["..."] to it.')
    for name in named:
        if name in known:
            return Family(name, _import(name, known[name]))
    near = difflib.get_close_matches(named[0], known, n=5, cutoff=0.5)
    raise UnsupportedError(
        f"Megatron-Bridge does not know the architecture {named[0]}",
        next_step=f"Nearest it knows: {', '.join(near)}." if near else f"It knows {', '.join(sorted(known))}.",
    )


def _import(architecture: str, module: str) -> Any:
    place = root()
    assert place is not None
    if module in _OWN.values():
        return importlib.import_module(module).BRIDGE()
    import transformers

    source = Path(place.parents[1], *module.split(".")).with_suffix(".py").read_text()
    for _, name in _REGISTRATION.findall(source):
        # The class serves as a name only; importing its module would take seconds.
        if name and name not in vars(transformers):
            setattr(transformers, name, type(name, (), {}))
    registered = _registrations()
    importlib.import_module(module)
    return registered[architecture]()


def _registrations() -> dict[str, Any]:
    """Fills up with Bridge's classes by architecture, as modules are imported."""
    conversion: Any = importlib.import_module("megatron.bridge.models.conversion.model_bridge")
    original = conversion.create_bridge_decorator
    out: dict[str, Any] = {}

    def create(*, source: Any, **rest: Any) -> Any:
        name = source if isinstance(source, str) else source.__name__
        decorate = original(source=name, **rest)

        def keep(bridge: Any) -> Any:
            out[name] = bridge
            return decorate(bridge)

        return keep

    conversion.create_bridge_decorator = create
    directly = conversion.register_bridge_implementation

    def register(*, source: Any, bridge_class: Any, **rest: Any) -> None:
        if isinstance(source, str):  # a second name of an architecture, such as K-EXAONE's
            out[source] = bridge_class
        directly(source=source, bridge_class=bridge_class, **rest)

    conversion.register_bridge_implementation = register
    return out


def read_config(folder: Path, config: Mapping[str, Any]) -> Any:
    """Transformers' configuration object of a snapshot; code that comes with a snapshot is never run.

    Args:
        folder: The snapshot's directory.
        config: The content of its config.json.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, ValueError, ImportError, OSError):  # a model type that transformers does not know
        return _plain_config(PretrainedConfig, config)


def _plain_config(cls: Any, config: Mapping[str, Any]) -> Any:
    """A configuration object with the fields of a config.json; parts that describe a model of their own are such too."""
    plain = cls()
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            value = _plain_config(cls, value)
        elif isinstance(value, list):
            value = [_Section(item) if isinstance(item, dict) else item for item in value]
        setattr(plain, name, value)
    return plain


class _Section(dict[str, Any]):
    """An object in a list of a config.json, such as ``block_configs``: released code gives its fields as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return _Section(self[name]) if isinstance(self[name], dict) else self[name]
