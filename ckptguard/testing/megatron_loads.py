"""Have real Megatron processes load a checkpoint, and say what they got.

A :class:`Megatron` is one helper process that has imported Megatron once and forks the ranks of a layout for each
question: starting costs seconds, a question little more than the load itself. It comes in two kinds. ``local`` has
Megatron's local spec, whose forward pass needs no kernels; ``te`` has the Transformer Engine specs over the skeleton
of ``ckptguard.megatron.te_skeleton``: no forward pass, but every key that a GPU run asks for, and Megatron-Bridge.

All processes are CPU processes over gloo, with ``cpu_stand_in``. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from ckptguard.testing.families import Layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kind = Literal["local", "te"]

TIMEOUT_SECONDS = 240.0
_LOG_LINES_SHOWN = 40
_SECONDS_TO_STOP = 15.0


class LoadError(RuntimeError):
    """A rank did not accept the checkpoint, or the processes took too long; the message has the rank's own error."""


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter or persistent buffer as a rank holds it after loading.

    Attributes:
        dtype: Torch's name of it.
        shape: Of the rank's own part.
        digest: SHA-256 of its elements, row-major and little-endian, in hex.
        overwritten: False if at least one element is still what it was filled with before the load.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    overwritten: bool


Rank = Mapping[str, Held]
"""By the name in the rank's own model; with virtual stages ``model<N>.`` stands before it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the ranks of a layout hold.

    Attributes:
        ranks: In order of their number.
        by_hand: Model arguments that Megatron-LM's ``--use-checkpoint-args`` does not take from a checkpoint although
            the stored value is not the default: a user has to give these on the command line too.
        iteration: Where the run would go on.
    """

    ranks: tuple[Rank, ...]
    by_hand: Mapping[str, object]
    iteration: int


class Megatron:
    """A helper process that answers questions about checkpoints; use it in a ``with`` statement.

    Args:
        kind: Which layer specs it has.
        timeout_seconds: How long the start and each question may take.
    """

    def __init__(self, kind: Kind, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.kind, self.timeout_seconds = kind, timeout_seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="ckptguard-loads-")
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        command = [sys.executable, "-m", "ckptguard.testing.loads_server", kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
        self._questions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the helper process and all that it started. Idempotent."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.terminate()  # it ends its ranks, which are no longer in its process group
            try:
                self._process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout
            self._process.stdout.close()
            self._log.close()
            self._scratch.cleanup()

    def logits(
        self, root: Path, layout: Layout, tokens: Sequence[int], *, vocab_size: int, new_tokens: int = 0
    ) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Run the model in fp32 on one sequence, built from the checkpoint's args with Megatron's local spec.

        Args:
            root: A checkpoint root.
            layout: How many ranks of which kind load it.
            tokens: The prompt.
            vocab_size: Without padding: rows after it are no part of the answer.
            new_tokens: Greedily chosen tokens to add to the prompt.

        Returns:
            Logits of the prompt, [tokens, vocab_size], and the tokens that follow it.

        Raises:
            LoadError: Megatron did not load it.
        """
        import numpy as np

        folder = self._ask("logits", root, layout, tokens=list(tokens), new_tokens=new_tokens, vocab_size=vocab_size)
        last = folder / f"rank_{layout.world_size - 1}"
        return np.load(last.with_suffix(".npy")), json.loads(last.with_suffix(".json").read_text())["new_tokens"]

    def loads_strictly(self, root: Path, layout: Layout) -> Loaded:
        """Load with Megatron-LM's ``load_checkpoint``; every key must be there, and no key besides.

        Args:
            root: A checkpoint root.
            layout: How many ranks of which kind load it.

        Raises:
            LoadError: A key is missing, left over or of another shape, or Megatron refuses the checkpoint.
        """
        return _loaded(self._ask("loads_strictly", root, layout), layout)

    def bridge_loads(self, root: Path, layout: Layout) -> Loaded:
        """Load with Megatron-Bridge's training code, the model built from the checkpoint's ``run_config.yaml``.

        Args:
            root: A checkpoint root.
            layout: How many ranks of which kind load it.

        Raises:
            LoadError: Bridge does not load it.
        """
        return _loaded(self._ask("bridge_loads", root, layout), layout)

    def bridge_imports(self, snapshot: Path, layout: Layout, *, vocab_multiple: int | None = None) -> Loaded:
        """Have Megatron-Bridge itself fill the ranks of a layout from a Hugging Face snapshot: what they should hold.

        Args:
            snapshot: A Hugging Face snapshot.
            layout: How many ranks of which kind to fill.
            vocab_multiple: Pad the vocabulary to a multiple of this times TP, as Megatron-LM does; None is Bridge's
                own default, no padding.

        Raises:
            LoadError: Bridge does not import it.
        """
        return _loaded(self._ask("bridge_imports", snapshot, layout, vocab_multiple=vocab_multiple), layout)

    def bridge_saves(self, snapshot: Path, layout: Layout, out: Path, *, vocab_multiple: int | None = None) -> Path:
        """Have Megatron-Bridge import a snapshot and save it with its own ``save_megatron_model``.

        Args:
            snapshot: A Hugging Face snapshot.
            layout: How many ranks of which kind import and save it.
            out: The checkpoint root to write.
            vocab_multiple: As in :meth:`bridge_imports`.

        Returns:
            ``out``.

        Raises:
            LoadError: Bridge does not import or save it.
        """
        self._ask("bridge_saves", snapshot, layout, out=str(out), vocab_multiple=vocab_multiple)
        return out

    def _ask(self, what: str, source: Path, layout: Layout, **more: Any) -> Path:
        """Send one question and wait; returns the folder with every rank's answer."""
        self._questions += 1
        folder = Path(self._scratch.name) / str(self._questions)
        folder.mkdir()
        question = {
            "what": what, "source": str(source.resolve()), "layout": dataclasses.asdict(layout), "folder": str(folder),
            "world_size": layout.world_size, "timeout_seconds": self.timeout_seconds, **more,
        }  # fmt: skip
        assert self._process.stdin
        begin = self._log.seek(0, os.SEEK_END)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._line()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise LoadError(f"the processes that load {source} ended or took too long.\n{self._tail(begin)}")
        errors = [f"rank {n}: {error}" for n, error in sorted(json.loads(answer).items())]
        if errors:
            raise LoadError(f"{what} of {source} failed.\n" + "\n".join(errors) + "\n" + self._tail(begin))
        return folder

    def _line(self) -> str:
        """The next line of the helper's output; empty if it ended or took too long."""
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            waited_seconds = self.timeout_seconds + _SECONDS_TO_STOP  # the helper itself says when ranks take too long
            return self._process.stdout.readline() if selector.select(waited_seconds) else ""

    def _tail(self, begin: int) -> str:
        self._log.seek(begin)
        return "\n".join(self._log.read().splitlines()[-_LOG_LINES_SHOWN:])


def hf_logits(
    snapshot: Path, tokens: Sequence[int], *, new_tokens: int = 0
) -> tuple[npt.NDArray[np.float32], list[int]]:
    """The same from transformers in this process: the weights as stored, computed in fp32.

    Args:
        snapshot: A Hugging Face snapshot.
        tokens: The prompt.
        new_tokens: Greedily chosen tokens to add to the prompt.

    Returns:
        Logits of the prompt, [tokens, vocab_size], and the tokens that follow it.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()
    prompt = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = model(prompt).logits[0]
        for _ in range(new_tokens):
            prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(-1)], dim=1)
    return logits.numpy(), prompt[0, len(tokens) :].tolist()


def _loaded(folder: Path, layout: Layout) -> Loaded:
    answers = [json.loads((folder / f"rank_{n}.json").read_text()) for n in range(layout.world_size)]
    ranks = tuple({name: _held(*fields) for name, fields in answer["held"].items()} for answer in answers)
    return Loaded(ranks, answers[0].get("by_hand", {}), answers[0]["iteration"])


def _held(dtype: str, shape: Sequence[int], digest: str, overwritten: bool) -> Held:
    return Held(dtype, tuple(shape), digest, overwritten)


def _environment() -> dict[str, str]:
    """The caller's, without its ranks and GPUs."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, own.get("PYTHONPATH")]))
    return own | {
        "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
