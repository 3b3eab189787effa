"""What values are recorded as: bit for bit what they are, whatever kind of tensor they are, and never an exception."""

from __future__ import annotations

import enum
import math
import random
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint.live import fingerprint_tensor
from ckptguard.resume.digests import LONG, Draft, recorded
from ckptguard.resume.records import same

DTYPES = sorted(name for name in BY_NAME if hasattr(torch, name))


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(0))
    return data.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_any_type_is_its_fingerprint_and_one_element_shows_its_value(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = bits(dtype, 3, 5)
    assert recorded(tensor) == f"#{fingerprint_tensor(tensor).hex} {name}[3, 5]"
    assert recorded(tensor.t()) == f"#{fingerprint_tensor(tensor.t()).hex} {name}[5, 3]"
    one = recorded(torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)[0])
    assert one.startswith(f"#{0:032x} {name}[]")
    assert len(one.split()) == (2 if name.startswith("float4") else 3)


def test_every_bit_counts() -> None:
    pairs = [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([0x7FC00000]).int().view(torch.float32), torch.tensor([0x7FC00001]).int().view(torch.float32)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1, 2), (2, 1)),
        (b"a", b"b"),
    ]
    for one, other in pairs:
        assert same(recorded(one), recorded(one))
        assert not same(recorded(one), recorded(other)), (one, other)
    assert same(recorded(math.nan), recorded(math.nan))


def test_views_empty_and_shaped_tensors() -> None:
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    for view in (
        base[1:3, ::2],
        base[:, 3],
        base[0:0],
        base.expand(2, 4, 6),
        base.t().conj(),
        torch.nn.Parameter(base),
    ):
        assert recorded(view) == f"#{fingerprint_tensor(view.detach()).hex} float32{list(view.shape)}"
    conj = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj()
    assert recorded(conj) == recorded(conj.resolve_conj())
    assert recorded(base[1, 2]).endswith(" float32[] 8.0")


class Opaque(torch.Tensor):
    """A tensor whose elements stand in others, as a quantised one's do, and that does not tell which."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("a recorder runs no operation on a wrapper")


class Coded(Opaque):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class Broken(Opaque):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise KeyError("codes")


class Quantised(Opaque):
    def get_metadata(self) -> dict[str, Any]:  # Transformer Engine's form
        return {
            "data": self.codes,
            "fp8_scale_inv": self.scale,
            "data_transpose": self.codes.t(),
            "quantizer": object(),
        }


def test_a_tensor_made_of_tensors_is_those() -> None:
    codes, scale = torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.tensor(0.25)
    assert recorded(Coded(codes, scale)) == {"codes": recorded(codes), "scale": recorded(scale)}
    assert recorded(Quantised(codes, scale)) == {"data": recorded(codes), "fp8_scale_inv": recorded(scale)}
    sparse = torch.eye(3).to_sparse()
    assert recorded(sparse) == {"indices": recorded(sparse._indices()), "values": recorded(sparse._values())}


def test_what_cannot_be_digested_is_said_in_words_and_does_not_raise() -> None:
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    odd = {
        "meta": torch.zeros(2, device="meta"),
        "freed": freed,
        "opaque": Opaque(torch.zeros(2), torch.ones(())),
        "broken": Broken(torch.zeros(2), torch.ones(())),
        "object": object(),
        "inside": [1, {"deep": iter(())}],
    }
    draft, names = Draft(), list(odd)  # pytest would print the freed one, which torch does not survive
    for name, value in odd.items():
        draft.add(name, value)
    values = draft.values()
    assert [words.partition(":")[0] for words in draft.unobserved] == names
    assert values["object"] == "?builtins.object"
    assert values["inside"][1] == {"deep": "?builtins.tuple_iterator"}


def test_plain_values_are_json_and_long_ones_a_hash() -> None:
    class Mode(enum.Enum):
        ON = 1

    value = {
        "a": (1, 2.5, None, "word"),
        3: {torch.bfloat16, torch.float32},
        "mode": Mode.ON,
        "path": torch.device("cpu"),
    }
    assert recorded(value) == {
        "a": [1, 2.5, None, "word"],
        "3": ["torch.bfloat16", "torch.float32"],
        "mode": "Mode.ON",
        "path": "cpu",
    }
    assert recorded(Namespace(lr=1e-3, function=math.sqrt)) == {"lr": 1e-3, "function": "math.sqrt"}
    assert recorded([torch.tensor(1.0), 2]) == [recorded(torch.tensor(1.0)), 2]
    assert recorded(b"bytes") == recorded(bytearray(b"bytes")) != recorded("bytes")
    assert recorded("x" * 5000).startswith("#b3:")
    assert recorded(list(range(LONG))) == list(range(LONG))
    assert recorded(list(range(LONG + 1))).startswith("#b3:")
    state = recorded(random.getstate())
    assert (state[0], state[1][:4]) == (3, "#b3:")
    assert len(str(recorded(np.random.get_state()))) < 120


def test_numpy_arrays_are_as_tensors() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert recorded(array) == recorded(torch.from_numpy(array))
    assert recorded(np.float32(2.5)) == recorded(torch.tensor(2.5))
    assert recorded(np.array(["a", "b"])).startswith("#b3:")
    assert recorded(np.array([object()])) == "?numpy.ndarray"


def test_a_draft_digests_at_once_and_keeps_no_tensor() -> None:
    tensor, draft = torch.ones(4), Draft()
    draft.add("before", tensor)
    tensor.zero_()
    draft.add("after", tensor)
    assert draft.values() == {"before": recorded(torch.ones(4)), "after": recorded(torch.zeros(4))}
    assert not len(draft)


def test_no_generator_no_graph_and_no_seen_operation() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    before = torch.get_rng_state()
    weight = torch.ones(4, 4, requires_grad=True)
    with Sees():
        for value in (weight, weight.detach().t(), torch.nn.Parameter(weight)):
            seen.clear()
            recorded(value)
            assert seen == []
    assert torch.equal(before, torch.get_rng_state())
    assert weight.grad_fn is None
