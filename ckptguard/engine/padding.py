"""Which elements of a tensor count: vocabulary padding rows and elements that no parameter owns are told apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box
from ckptguard.core.index import Facts, TensorEntry

USED, PADDING, UNUSED = 0, 1, 2
# Megatron pads the vocabulary to a multiple of TP x make_vocab_size_divisible_by (training/tokenizer); these tensors and
# their optimizer states have it as first dim (core/models/common/embeddings, core/tensor_parallel/layers.py).
_VOCAB_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")


class Rules:
    """What both checkpoints say about their vocabulary, and the ranges that no parameter owns.

    Args:
        a: Facts of one checkpoint.
        b: Facts of the other.
        unused_ranges: By tensor name, half-open element ranges of 1-D tensors.
    """

    def __init__(self, a: Facts, b: Facts, unused_ranges: Mapping[str, tuple[tuple[int, int], ...]]) -> None:
        known = {vocab_size(a), vocab_size(b)} - {None}
        self.vocab = known.pop() if len(known) == 1 else None
        self.unused = unused_ranges

    def kinds(self, entry: TensorEntry, part: Box, where: npt.NDArray[np.intp]) -> npt.NDArray[np.int8]:
        """USED, PADDING or UNUSED for elements of a part.

        Args:
            entry: The tensor.
            part: A box of it.
            where: Row-major numbers of elements inside the box.
        """
        out = np.zeros(len(where), np.int8)
        if self.vocab is not None and is_vocab(entry.name) and part.size:
            rows = part.offset[0] + where // (part.numel // part.size[0])
            out[rows >= self.vocab] = PADDING
        for begin, end in self.unused.get(entry.name, ()):
            index = part.offset[0] + where
            out[(index >= begin) & (index < end)] = UNUSED
        return out

    def only_padding_rows(self, a: TensorEntry, b: TensorEntry) -> bool:
        """Whether two vocabulary tensors differ in shape only by rows beyond the vocabulary."""
        smaller = min(a.shape[0], b.shape[0]) if a.shape and b.shape else 0
        return is_vocab(a.name) and same_but_rows(a, b) and self.vocab is not None and smaller >= self.vocab


def is_vocab(name: str) -> bool:
    """Whether a tensor has the vocabulary as its first dim (optimizer states of such a tensor too)."""
    return any(name == t or name.endswith((f".{t}", f":{t}")) for t in _VOCAB_TENSORS)


def same_but_rows(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether the shapes are equal, or those of vocabulary tensors that differ in the first dim only."""
    return a.shape == b.shape or (is_vocab(a.name) and len(a.shape) == len(b.shape) > 0 and a.shape[1:] == b.shape[1:])


def vocab_size(facts: Facts) -> int | None:
    """The vocabulary without padding, if the checkpoint says it."""
    model = facts.run_config.get("model")
    sources = (facts.args, model if isinstance(model, Mapping) else {}, facts.extra)
    for source in sources:
        value = source.get("vocab_size")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
