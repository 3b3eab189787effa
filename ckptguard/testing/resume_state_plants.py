"""Faults in what a resumed process holds right after loading, planted in the live process by ``resume_faults.plant``.

Every plant takes the recorder of its rank, and waits for the moment before the loaded state is recorded. It finds what it
changes among the watched items, or in Megatron's own objects where a fault has a shape that no item has (parameter groups that
swap their options). A plant that finds nothing to change raises: a fault that is not there proves nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ckptguard.core.watching import Group, LiveItem

Plant = Callable[[Any], None]
Items = Mapping[str, LiveItem]
# The last row of a vocabulary of 511 padded to 512: no sample has it, so what is in it reaches nothing else.
CORNER = re.compile(r"embedding\.word_embeddings\.weight")
_CORNER_ROW = 511
_NAN_BITS = 0x7FC00001  # a quiet NaN with a payload
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def when_loaded(act: Callable[[Any, Items], None], *, ranks: tuple[int, ...] | None = (0,)) -> Plant:
    """A plant that acts once a checkpoint was loaded, on some ranks or, with None, on all; not in a run from scratch."""

    def plant(recorder: Any) -> None:
        def loaded(recorder: Any, step: int, items: Items) -> None:
            if step > 0 and (ranks is None or recorder.rank in ranks):
                with torch.no_grad():
                    act(recorder, items)

        recorder.before["loaded"].append(loaded)

    return plant


def find(items: Items, group: Group, pattern: str) -> list[LiveItem]:
    """The items of a group whose names have the pattern, in order; at least one.

    Raises:
        LookupError: There is none.
    """
    found = [item for item in items.values() if item.group == group and re.search(pattern, item.name)]
    if not found:
        there = [item.name for item in items.values() if item.group == group]
        raise LookupError(f"no item of group {group!r} has {pattern!r}; there are {there[:40]}")
    return found


def change(item: LiveItem, edit: Callable[[Any], Any]) -> None:
    """Puts back what ``edit`` makes of a value; a tensor is given as a flat copy and may be edited in place."""
    if item.write is None:
        raise LookupError(f"{item.name} cannot be written")
    value = item.read()
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone().contiguous()
        edit(copy.view(-1))
        item.write(copy)
    else:
        item.write(edit(value))


def bits(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return flat.view(_INTEGERS[flat.element_size()])


def flipped_bit(group: Group, pattern: str, *, elements: int = 1) -> Plant:
    """Flips the lowest bit of the last elements of the first such item."""

    def edit(flat: torch.Tensor) -> None:
        bits(flat)[-elements:] ^= 1

    return when_loaded(lambda _, items: change(find(items, group, pattern)[0], edit))


def swapped_elements(group: Group, pattern: str) -> Plant:
    """Swaps the first two elements that are not equal."""

    def edit(flat: torch.Tensor) -> None:
        other = int((bits(flat) != bits(flat)[0]).nonzero()[0])
        flat[0], flat[other] = flat[other].clone(), flat[0].clone()

    return when_loaded(lambda _, items: change(find(items, group, pattern)[0], edit))


def _corner_elements(item: LiveItem) -> slice:
    """Where the unused row is in the flat tensor of a rank that holds it whole."""
    from megatron.training import get_args

    width = get_args().hidden_size
    if item.read().numel() < (_CORNER_ROW + 1) * width:
        raise LookupError(f"{item.name} does not hold the row that no sample uses")
    return slice(_CORNER_ROW * width, (_CORNER_ROW + 1) * width)


def corner_values(recorder: Any) -> None:
    """Puts a zero and a NaN into a row of weights that no sample uses, in a run from scratch."""

    def loaded(recorder: Any, step: int, items: Items) -> None:
        if step > 0:
            return
        groups: tuple[Group, ...] = ("parameter", "master")
        for item in (found for group in groups for found in find(items, group, CORNER.pattern)):

            def edit(flat: torch.Tensor, item: LiveItem = item) -> None:
                row = flat[_corner_elements(item)]
                row[0] = 0.0
                bits(row)[1] = _NAN_BITS if row.element_size() == 4 else _NAN_BITS >> 16

            with torch.no_grad():
                change(item, edit)

    recorder.before["loaded"].append(loaded)


def corner_bits(group: Group, element: int, mask: Callable[[int], int]) -> Plant:
    """Flips bits of an element of the unused row; ``mask`` is given the size of an element in bytes."""

    def act(_: Any, items: Items) -> None:
        (item,) = find(items, group, CORNER.pattern)

        def edit(flat: torch.Tensor) -> None:
            row = bits(flat[_corner_elements(item)])
            if not row[element : element + 1].any() and element:
                raise LookupError(f"{item.name} has no prepared value")
            row[element] ^= mask(row.element_size())

        change(item, edit)

    return when_loaded(act)


def sign_bit(element_bytes: int) -> int:
    """The sign as a number that a signed integer of that size can take."""
    return -(1 << (8 * element_bytes - 1))


def swapped_items(groups: tuple[Group, ...], one: str, other: str) -> Plant:
    """Swaps the values of items whose names differ in one part."""

    def act(_: Any, items: Items) -> None:
        for group in groups:
            for item in find(items, group, one):
                partner = items.get(re.sub(one, other, item.name))
                if partner is None or item.write is None or partner.write is None:
                    raise LookupError(f"{item.name} has no counterpart with {other!r} that can be written")
                values = [x.read().detach().clone() for x in (item, partner)]
                if values[0].shape == values[1].shape:
                    item.write(values[1])
                    partner.write(values[0])

    return when_loaded(act, ranks=None)


def narrowed_buffer(name: str) -> Plant:
    """Keeps a buffer in bfloat16; a router makes float32 of it again when it computes."""

    def act(recorder: Any, _: Items) -> None:
        held = [m for chunk in recorder.modules for m in chunk.modules() if m._buffers.get(name) is not None]
        if not held or held[0]._buffers[name].dtype is not torch.float32:
            raise LookupError(f"no module has a buffer {name} in float32")
        held[0]._buffers[name] = held[0]._buffers[name].bfloat16()

    return when_loaded(act)


def param_groups(recorder: Any) -> Iterator[list[dict[str, Any]]]:
    """The lists of parameter groups of the optimizers under Megatron's."""
    for part in getattr(recorder.optimizer, "chained_optimizers", [recorder.optimizer]):
        yield part.optimizer.param_groups


def groups_changed(edit: Callable[[list[dict[str, Any]]], None]) -> Plant:
    """Edits the parameter groups of the first optimizer in place, on all ranks."""
    return when_loaded(lambda recorder, _: edit(next(param_groups(recorder))), ranks=None)


def emptied_group(groups: list[dict[str, Any]]) -> None:
    """Takes the parameters from the last group, so that nothing updates them."""
    groups[-1]["params"].clear()


def swapped_groups(groups: list[dict[str, Any]]) -> None:
    """Gives the first two groups each other's options, as when a stored list has another order."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups[:2]]
    if options[0] == options[1]:
        raise LookupError(f"the groups are alike: {options[0]}")
    groups[0].update(options[1])
    groups[1].update(options[0])


def copied_field(name: str) -> Callable[[list[dict[str, Any]]], None]:
    """Gives a group the value that another group has in this field."""

    def edit(groups: list[dict[str, Any]]) -> None:
        source = next(g for g in groups if g[name] != groups[0][name])
        groups[0][name] = source[name]

    return edit


def adam_step(by: int) -> Plant:
    """Moves the step count of every group."""

    def edit(groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group["step"] += by

    return groups_changed(edit)


def stale_weight_decay(groups: list[dict[str, Any]]) -> None:
    """The weight decay that the schedule begins with, as if the scheduler had not been restored."""
    from megatron.training import get_args

    start = get_args().start_weight_decay
    if all(group["weight_decay"] == start * group["wd_mult"] for group in groups):
        raise LookupError("the weight decay is the one that the schedule begins with")
    for group in groups:
        group["weight_decay"] = start * group["wd_mult"]


def scaler_attribute(name: str, by: int) -> Plant:
    """Moves a counter of the gradient scaler, on all ranks."""

    def act(recorder: Any, _: Items) -> None:
        parts = getattr(recorder.optimizer, "chained_optimizers", [recorder.optimizer])
        scalers = {id(part.grad_scaler): part.grad_scaler for part in parts if part.grad_scaler is not None}
        for scaler in scalers.values():
            setattr(scaler, name, getattr(scaler, name) + by)

    return when_loaded(act, ranks=None)


def number(group: Group, pattern: str, by: int) -> Plant:
    """Moves a watched number, on all ranks."""
    return when_loaded(lambda _, items: change(find(items, group, pattern)[0], lambda value: value + by), ranks=None)


def generators_swapped(stream: str) -> Plant:
    """Swaps a stream of Megatron's generator tracker between the first two ranks."""

    def act(recorder: Any, _: Items) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, states[stream])
        if torch.equal(gathered[0], gathered[1]):
            raise LookupError(f"ranks 0 and 1 have the same {stream}")
        if recorder.rank < 2:
            tracker.set_states(states | {stream: gathered[1 - recorder.rank]})

    return when_loaded(act, ranks=None)


def reseeded(kind: str) -> Plant:
    """A generator as a process seeds it at its start, on all ranks."""

    def act(_: Any, __: Items) -> None:
        from megatron.training import get_args

        seed = get_args().seed
        seeds: dict[str, Callable[[int], object]]
        seeds = {"python": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}
        seeds[kind](seed)

    return when_loaded(act, ranks=None)


def drawing(recorder: Any) -> None:
    """Uses Python's and numpy's generators once per step, as a data set would."""

    def stepped(*_: Any) -> None:
        random.random()
        np.random.rand()

    recorder.before["step"].append(stepped)


def cuda_apart(_: Any) -> None:
    """Gives CUDA a generator of its own, as a GPU has; on the CPU stand-in it is torch's CPU generator."""
    generator = torch.Generator().manual_seed(1)

    def read(*_: Any, **__: Any) -> torch.Tensor:
        return generator.get_state()

    def write(state: torch.Tensor, *_: Any, **__: Any) -> None:
        generator.set_state(state)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state = read, write  # type: ignore[attr-defined]
    torch.accelerator.set_device_index = lambda *_: None  # by the thread that pins batches


def one_draw(_: Any, __: Items) -> None:
    """One number of torch's CPU generator."""
    torch.rand(())
