"""What a Hugging Face snapshot says of itself: ``config.json``, and what each file is there for.

Source: transformers/configuration_utils.py ``PreTrainedConfig`` (5.12: ``dtype``, before 4.56 ``torch_dtype``), and the
file names in transformers/utils/__init__.py and tokenization_utils_base.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Facts
from ckptguard.core.problems import Problem
from ckptguard.formats.hf_tables import INDEX_SUFFIX
from ckptguard.formats.storage import Directory

CONFIG = "config.json"
# What a reader wants to see of a config, in order. A name of the right column stands for the left one in some families.
_SHOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("architectures", ()),
    ("model_type", ()),
    ("dtype", ("torch_dtype",)),
    ("num_hidden_layers", ("n_layer", "num_layers")),
    ("hidden_size", ("n_embd", "d_model")),
    ("intermediate_size", ("n_inner", "ffn_hidden_size")),
    ("num_attention_heads", ("n_head",)),
    ("num_key_value_heads", ()),
    ("head_dim", ()),
    ("num_experts", ("num_local_experts", "n_routed_experts")),
    ("num_experts_per_tok", ()),
    ("moe_intermediate_size", ()),
    ("vocab_size", ()),
    ("max_position_embeddings", ("n_positions",)),
    ("tie_word_embeddings", ()),
    ("transformers_version", ()),
)
# Of a Trainer's checkpoint (transformers/trainer.py); all but the JSON are pickles.
_TRAINER = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth|training_args\.bin|trainer_state\.json")
_ROLES = {
    CONFIG: "model configuration",
    "generation_config.json": "generation defaults",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer configuration",
    "special_tokens_map.json": "tokenizer configuration",
    "added_tokens.json": "tokenizer configuration",
    "tokenizer.model": "tokenizer",
    "spiece.model": "tokenizer",
    "sentencepiece.bpe.model": "tokenizer",
    "vocab.json": "tokenizer",
    "vocab.txt": "tokenizer",
    "merges.txt": "tokenizer",
    "chat_template.jinja": "chat template",
    "chat_template.json": "chat template",
    "preprocessor_config.json": "input processing",
    "processor_config.json": "input processing",
    "quantize_config.json": "quantization",
    "hf_quant_config.json": "quantization",
    "adapter_config.json": "adapter configuration",
    "README.md": "model card",
}


def role_of(name: str) -> str | None:
    """What a file other than weights is there for, or None where that is not known."""
    if name.endswith(INDEX_SUFFIX):
        return "index"
    if name.endswith(".py"):
        return "code of the repository, never run"
    if _TRAINER.fullmatch(name):
        return "state of a transformers Trainer, not read"
    if name.startswith("additional_chat_templates/"):
        return "chat template"
    return _ROLES.get(name) or ("tokenizer" if name.endswith(".tiktoken") else None)


def gather(files: Directory, *, source: dict[str, object]) -> tuple[Facts, list[Problem]]:
    """Facts for display; a ``config.json`` that cannot be read is a problem, a missing one is not.

    Args:
        files: The snapshot.
        source: Facts on where it came from, put first.
    """
    extra = dict(source)
    if CONFIG not in files.listing:
        return Facts(extra=extra), []
    try:
        config = _config(files)
    except DamagedError as error:
        return Facts(extra=extra), list(error.problems) or [Problem("unreadable", error.message, file=CONFIG)]
    text = config.get("text_config")  # the language model's own part of a multimodal config
    parts = [config, text] if isinstance(text, dict) else [config]
    for name, others in _SHOWN:
        for key in (name, *others):
            value = next((part[key] for part in parts if part.get(key) is not None), None)
            if value is not None:
                extra[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
                break
    quantization = next((q for part in parts if isinstance(q := part.get("quantization_config"), dict)), None)
    if quantization is not None:
        extra["quantization"] = _in_words(quantization)
    return Facts(extra=extra), []


def _config(files: Directory) -> dict[str, Any]:
    try:
        config = json.loads(files.read(CONFIG))
    except (ValueError, RecursionError) as error:
        message = f"{CONFIG}: not JSON ({error})"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=CONFIG)]) from error
    if not isinstance(config, dict):
        message = f"{CONFIG}: holds a {type(config).__name__}, expected an object"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=CONFIG)])
    return config


def _in_words(quantization: dict[str, Any]) -> str:
    """``quantization_config`` in one line: the method, then what is plain in it."""
    method = str(quantization.get("quant_method", "unnamed method"))
    rest = [f"{k}={v}" for k, v in quantization.items() if k != "quant_method" and isinstance(v, str | int | float)]
    return f"{method} ({', '.join(rest)})" if rest else method
