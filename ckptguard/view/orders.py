"""What node 0 has all nodes do, and what they answer. Frozen values.

An order goes to every node; a node does its own part of it: copies and deliveries name their node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ckptguard.view.values import Agreement, Checked, Copy, Delivered, Delivery, Needs, NodeReport, Step

Verb = Literal["survey", "needs", "check", "compare", "offer", "deliver", "publish", "confirm", "end"]
Blame = Literal["absent", "damaged", "environment"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no view, the same on every node.

    Attributes:
        blame: Which kind of error it is; ``absent``: there is no checkpoint at all.
        message: What was found, with node, file and cause.
        next_step: What to do about it.
    """

    blame: Blame
    message: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Order:
    """One step of the work.

    Attributes:
        verb: What is done: ``survey``: look at all places; ``needs``: node 0 finds out what each node's ranks read; ``check``:
            look into copies wholly; ``compare``: take their fast digests; ``offer``: let others have the copies that deliveries
            name; ``deliver``: get files into the staging directory; ``publish``: make the view appear; ``confirm``: from here
            on it stays; ``end``: nothing more comes.
        step: What it is about.
        names: Data files of the step, for ``needs``.
        copies: For ``check`` and ``compare``.
        deliveries: For ``offer`` and ``deliver``.
        urls: For ``deliver``: where the servers of the nodes answer.
        agreement: For ``publish``, and in the end if there is a view.
        refusal: In the end, if there is none.
        notes: In the end: what people should know, in sentences.
    """

    verb: Verb
    step: Step | None = None
    names: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    urls: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    agreement: Agreement | None = None
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order on one node: what the order's verb asks for."""

    node: int
    report: NodeReport | None = None
    needs: Needs | None = None
    checked: tuple[Checked, ...] = ()
    delivered: tuple[Delivered, ...] = ()
