"""Hand-made results of verify-resume, one for each thing that can come out: what reports are tested and looked at with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from random import Random

from ckptguard.core.watching import Group
from ckptguard.resume.results import (
    ArmRun,
    Comparison,
    Culprit,
    Curve,
    Difference,
    Excused,
    KnownFault,
    Setting,
    Verification,
)

ROOT = "/runs/verify/2026-01-31"
FACTS = {
    "framework": "Megatron-LM",
    "versions": {"megatron-core": "0.19.2", "torch": "2.14.1", "ckptguard": "0.1.0"},
    "world_size": 4,
    "axes": {"tp": 2, "pp": 1, "dp": 2, "ep": 2},
}
OBSERVED: tuple[tuple[Group, int], ...] = (
    ("counter", 2), ("rng at begin", 6), ("batch", 4), ("loss", 1), ("gradient", 28), ("metric", 2), ("master", 28),
    ("optimizer", 57), ("parameter", 28), ("buffer", 2), ("unsaved buffer", 1), ("extra state", 8), ("param group", 24),
    ("scheduler", 5), ("rng", 6),
)  # fmt: skip
CPU_RNG = Excused(
    rule="cpu-rng-offset",
    why="DataLoader draws its base seed from torch's CPU generator when the iterator is made, after the checkpoint was loaded; "
    " nothing on a GPU draws from this generator afterwards.",
    items=("rng torch cpu",),
    ranks=(0, 1, 2, 3),
    steps=(10, 20),
    count=44,
)
UNOBSERVED = ("random generators of DataLoader workers (separate processes)", "autotuning caches of Triton and cuBLAS")
PRETRAIN = (
    "torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "256", "--seq-length", "128",
    "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--num-experts", "4", "--micro-batch-size", "1",
    "--global-batch-size", "8", "--bf16", "--lr", "1e-4", "--train-iters", "1000", "--data-path", "data/books text_document",
)  # fmt: skip


def digest(seed: str, tail: str = "bfloat16[512, 256]") -> str:
    """A recorded value, as of a tensor."""
    return f"#{Random(seed).getrandbits(128):032x} {tail}"


def arm(name: str, purpose: str, *flags: str, seconds: float = 41.3, exit_code: int | None = 0) -> ArmRun:
    """One launch of ``PRETRAIN``."""
    folder = f"{ROOT}/{name.split(' ')[0]}"
    return ArmRun(
        name=name,
        purpose=purpose,
        command=(*PRETRAIN, *flags),
        environment=(("CKPTGUARD_RECORD", f"{folder}/order.json"), ("PYTHONPATH", "ckptguard/resume/site")),
        folder=folder,
        log=f"{folder}/log.txt",
        exit_code=exit_code,
        seconds=seconds,
    )


def arms() -> tuple[ArmRun, ...]:
    """The five main ones."""
    save = ("--save", f"{ROOT}/save/checkpoints", "--save-interval", "10")
    load = ("--load", f"{ROOT}/save/checkpoints")
    return (
        arm("reference", "steps 1 to 20, uninterrupted", "--exit-interval", "20", seconds=64.2),
        arm("repeat", "the same again: is the run deterministic?", "--exit-interval", "20", seconds=63.8),
        arm("save", "steps 1 to 10, saves, stops", "--exit-interval", "10", *save, seconds=38.1),
        arm("load", "loads, records, stops before any step", *load, seconds=12.7),
        arm("resume", "loads, steps 11 to 20", "--exit-interval", "20", *load, seconds=39.6),
    )


def equal_comparison(one: str, other: str, question: str, steps: tuple[int, int], values: int) -> Comparison:
    """Nothing differs."""
    return Comparison(
        one=one, other=other, question=question, steps=steps, values=values, ranks=4, first=None, at_first=(), agreeing=(),
        cells=(), excused=(),
    )  # fmt: skip


def repeats() -> Comparison:
    """The run is deterministic."""
    return equal_comparison("reference", "repeat", "is the run deterministic?", (1, 20), 19_280)


def saves_alike() -> Comparison:
    """Saving does not change the run."""
    return equal_comparison("reference", "save", "does saving change the run?", (1, 10), 9_640)


def curves(
    shift: float = 0.0, since: int = 11, *, steps: int = 20, repeat_since: int | None = None
) -> tuple[Curve, ...]:
    """Loss and gradient norm; those of ``resume`` (or of ``repeat``) are off from a step on."""
    noise = Random(7)
    loss = {s: 4.5 + 5.2 * math.exp(-s / (0.4 * steps)) + noise.uniform(-0.06, 0.06) for s in range(1, steps + 1)}
    norm = {s: 1.1 + 7.5 * math.exp(-s / (0.2 * steps)) + noise.uniform(-0.12, 0.12) for s in range(1, steps + 1)}
    skipped = dict.fromkeys(loss, 0.0)
    half = steps // 2

    def off(base: dict[int, float], first: int, last: int, start: int | None) -> tuple[tuple[int, float], ...]:
        def grown(step: int) -> float:
            if start is None or step < start or base is skipped:
                return 0.0
            return shift * (step - start + 1) ** 1.5 * (-1) ** step

        return tuple((s, base[s] + grown(s)) for s in range(first, last + 1))

    return tuple(
        Curve(name, of, off(base, first, last, start))
        for of, base in (("loss lm loss", loss), ("metric grad norm", norm), ("metric skipped", skipped))
        for name, first, last, start in (
            ("reference", 1, steps, None),
            ("repeat", 1, steps, repeat_since),
            ("save", 1, half, None),
            ("resume", half + 1, steps, since),
        )
    )


def equal() -> Verification:
    """Everything is as it should be."""
    return Verification(
        word="equal",
        sentence="Saved after step 10 and resumed, the run goes on bit for bit as the uninterrupted one up to step 20.",
        steps=20,
        saved_at=(10,),
        facts=FACTS,
        settings=(),
        arms=arms(),
        comparisons=(
            repeats(),
            saves_alike(),
            equal_comparison("save", "load", "does the checkpoint hold the whole state?", (10, 10), 780),
            dataclasses.replace(
                equal_comparison(
                    "reference", "resume", "does the resumed run go on as it would have?", (11, 20), 9_640
                ),
                excused=(CPU_RNG,),
            ),
        ),
        culprits=(),
        chain=(
            "reference and repeat are equal in 19,280 values of 4 ranks: the run is deterministic.",
            "reference and save are equal up to step 10: saving does not change the run.",
            "The state that load holds is the state that save wrote.",
            "reference and resume are equal in steps 11 to 20.",
        ),
        known=(),
        curves=curves(),
        unobserved=UNOBSERVED,
        observed=OBSERVED,
        stored_bytes_per_rank_step=18_944,
    )


def _differences(
    kind: str, step: int, ranks: Sequence[int], items: Sequence[tuple[str, Group]], tail: str = "bfloat16[512, 256]"
) -> tuple[Difference, ...]:
    return tuple(
        Difference(
            kind, step, rank, item, group, digest(f"{item} {rank} one", tail), digest(f"{item} {rank} other", tail)
        )  # type: ignore[arg-type]
        for rank in ranks
        for item, group in items
    )


def state_fault() -> Verification:
    """A generator that the checkpoint does not carry: the known fault of expert-parallel ranks."""
    name = "rng tracker expert-parallel-rng"
    first = _differences("loaded", 10, (1, 3), ((name, "rng"),), "uint8[5056]")
    later: tuple[tuple[str, Group], ...] = tuple(
        (f"{sort} chunk 0 decoder.layers.{n}.mlp.experts.linear_fc{m}.weight0", sort)
        for sort in ("gradient", "master", "optimizer", "parameter")
        for n in range(4)
        for m in (1, 2)
    )
    at_step = tuple(
        d
        for rank in (1, 3)
        for d in (
            *_differences("step", 11, (rank,), ((f"{name} at begin", "rng at begin"),), "uint8[5056]"),
            *_differences("step", 11, (rank,), later),
        )
    )  # fmt: skip
    load = Comparison(
        one="save", other="load", question="does the checkpoint hold the whole state?", steps=(10, 10), values=780, ranks=4,
        first=first[0], at_first=first,
        agreeing=(("counter", 8), ("master", 112), ("optimizer", 228), ("parameter", 112), ("buffer", 8), ("extra state", 32),
                  ("param group", 96), ("scheduler", 20), ("rng", 22)),
        cells=((1, 10, 1, "rng"), (3, 10, 1, "rng")), excused=(CPU_RNG,),
    )  # fmt: skip
    resume = Comparison(
        one="reference", other="resume", question="does the resumed run go on as it would have?", steps=(11, 20), values=9_640,
        ranks=4, first=at_step[0], at_first=at_step, agreeing=(("counter", 8), ("batch", 16), ("scheduler", 20)),
        cells=tuple((r, s, 33 + 4 * (s - 11), "rng at begin" if r in (1, 3) else "gradient") for s in range(11, 21)
                    for r in range(4) if s > 11 or r in (1, 3)),
        excused=(CPU_RNG,),
    )  # fmt: skip
    return dataclasses.replace(
        equal(),
        word="different",
        sentence=f"Right after loading, rank 1 does not hold the {name!r} that was saved after step 10.",
        comparisons=(repeats(), saves_alike(), load, resume),
        culprits=(
            Culprit(
                "state", 1, 10, name,
                "restored alone from save on ranks 1 and 3, the resumed run is equal to the reference up to step 20",
            ),
        ),
        chain=(
            "reference and repeat are equal in 19,280 values of 4 ranks: the run is deterministic.",
            "reference and save are equal up to step 10: saving does not change the run.",
            "save and load differ in 1 item of ranks 1 and 3: the checkpoint does not carry it, or loading loses it.",
            "With this item restored from save and nothing else, resume is equal to reference: it alone is responsible.",
        ),
        known=(
            KnownFault(
                "NVIDIA/Megatron-LM#6858",
                "Expert-parallel ranks above 0 come back with the generator state of expert-parallel rank 0.",
                "megatron-core 0.19.2 with EP 2: rank 1 holds what rank 0 saved.",
                "Use a Megatron Core that has the change, or save under EP 1.",
            ),
        ),
        curves=curves(2e-4),
    )  # fmt: skip


def module_fault() -> Verification:
    """One rank computes something else in one module of one step, though it was given the same."""
    scope = "chunk 0 decoder.layers.1.mlp.linear_fc2"
    items: tuple[tuple[str, Group], ...] = (
        ("loss lm loss", "loss"),
        *(
            (f"gradient chunk 0 decoder.layers.{n}.mlp.linear_fc{m}.weight", "gradient")
            for n in range(4)
            for m in (1, 2)
        ),
        ("metric grad norm", "metric"),
        *((f"optimizer exp_avg chunk 0 decoder.layers.{n}.mlp.linear_fc1.weight", "optimizer") for n in range(4)),
    )
    first = _differences("step", 13, (2,), items)
    first = (dataclasses.replace(first[0], one=f"{digest('l1', 'float32[]')} 6.146692276000977",
                                 other=f"{digest('l2', 'float32[]')} 6.146692752838135"), *first[1:])  # fmt: skip
    first = tuple(dataclasses.replace(d, one=3.0512943267822266, other=3.051294803619385) if d.group == "metric" else d
                  for d in first)  # fmt: skip
    resume = Comparison(
        one="reference", other="resume", question="does the resumed run go on as it would have?", steps=(11, 20), values=9_640,
        ranks=4, first=first[0], at_first=first,
        agreeing=(("counter", 8), ("rng at begin", 24), ("batch", 16), ("gradient", 104), ("parameter", 112), ("buffer", 8),
                  ("extra state", 32), ("param group", 96), ("scheduler", 20), ("rng", 24)),
        cells=tuple((r, s, 14 + 9 * (s - 13) + r, "loss" if r == 2 or s > 14 else "gradient") for s in range(13, 21)
                    for r in range(4) if s > 13 or r == 2),
        excused=(),
    )  # fmt: skip
    return dataclasses.replace(
        equal(),
        word="different",
        sentence="At step 13 rank 2 has another 'loss lm loss', though state and batch were equal when the step began.",
        arms=(
            *arms(),
            arm("reference (modules, step 13)", "records module calls", "--exit-interval", "13", seconds=44.0),
            arm("resume (modules, step 13)", "records module calls", "--exit-interval", "13", seconds=21.9),
            arm("resume (operations, step 13)", f"records operations in {scope}", "--exit-interval", "13", seconds=22.4),
        ),
        comparisons=(*equal().comparisons[:3], resume),
        culprits=(
            Culprit("module", 2, 13, f"{scope}, forward, call 0", "its inputs agree and its outputs differ"),
            Culprit("op", 2, 13, f"aten.mm.default in {scope}, call 0", "its 2 inputs agree and its output differs"),
        ),
        chain=(
            *equal().chain[:3],
            "reference and resume differ first at step 13 on rank 2, in the loss; its batch and parameters agree.",
            f"Of 214 module calls in that step the first whose inputs agree and outputs differ is {scope}, forward.",
            "Inside it the first such operation is aten.mm.default.",
        ),
        curves=curves(4.8e-7, 13),
    )  # fmt: skip


def not_deterministic() -> Verification:
    """The same run twice is not the same."""
    items: tuple[tuple[str, Group], ...] = tuple(
        (f"gradient chunk 0 decoder.layers.{n}.mlp.router.weight", "gradient") for n in range(4)
    )
    first = _differences("step", 7, (0, 1), items, "float32[4, 256]")
    repeat = Comparison(
        one="reference", other="repeat", question="is the run deterministic?", steps=(1, 20), values=19_280, ranks=4,
        first=first[0], at_first=first, agreeing=(("counter", 8), ("batch", 16), ("loss", 4), ("rng", 24), ("gradient", 104)),
        cells=tuple((r, s, 8 + s, "gradient" if s == 7 else "loss") for s in range(7, 21) for r in range(4) if s > 7 or r < 2),
        excused=(),
    )  # fmt: skip
    return dataclasses.replace(
        equal(),
        word="not deterministic",
        sentence="Two uninterrupted runs of the same line differ from step 7 on: whether a resume is exact cannot be said.",
        settings=(
            Setting("NCCL_ALGO", None, "Ring", "The algorithm decides the order of summation.", "required", "variable"),
            Setting("--deterministic-mode", None, "given", "Megatron picks kernels without atomics.", "advised", "flag"),
        ),
        comparisons=(repeat,),
        culprits=(
            Culprit("op", 0, 7, "aten.index_add_.default in chunk 0 decoder.layers.3.mlp.router, backward, call 1",
                    "its 3 inputs agree and its output differs"),
        ),
        chain=("reference and repeat differ first at step 7 on rank 0, in gradients of the routers.",),
        curves=curves(3e-6, 21, repeat_since=7),
    )  # fmt: skip


def failed_arm() -> Verification:
    """The resumed run did not run."""
    *done, resume = arms()
    return dataclasses.replace(
        equal(),
        word="failed",
        sentence="The arm 'resume' ended with exit code 1 before its first step: AssertionError in Adam.",
        arms=(
            *done,
            dataclasses.replace(
                resume,
                exit_code=1,
                seconds=14.9,
                problem="ended with exit code 1 before its first step",
                last_lines=(
                    "  File \"torch/optim/adam.py\", line 423, in _single_tensor_adam",
                    "    assert step_t.device.type == 'cpu' or capturable",
                    "AssertionError: If capturable=False, state_steps should not be CUDA tensors.",
                    "E0131 14:02:11 torch/distributed/elastic: failed (exitcode: 1) local_rank: 0 <script>&amp;",
                ),
            ),
        ),
        comparisons=(repeats(), saves_alike()),
        chain=equal().chain[:2],
        curves=tuple(c for c in curves() if c.arm != "resume"),
    )  # fmt: skip


def many_ranks(ranks: int = 64, steps: int = 20, items: int = 24) -> Verification:
    """A fault in one data-parallel group that spreads to all ranks in the next step."""
    names: tuple[tuple[str, Group], ...] = tuple(
        (f"optimizer exp_avg_sq chunk 0 decoder.layers.{n}.self_attention.linear_qkv.weight", "optimizer")
        for n in range(items)
    )
    half, group = steps // 2, range(ranks // 8, ranks // 4)
    first = _differences("loaded", half, group, names, "float32[192, 256]")
    load = Comparison(
        one="save", other="load", question="does the checkpoint hold the whole state?", steps=(half, half), values=195 * ranks,
        ranks=ranks, first=first[0], at_first=first,
        agreeing=(("counter", 2 * ranks), ("master", 28 * ranks), ("parameter", 28 * ranks), ("rng", 6 * ranks)),
        cells=tuple((r, half, items, "optimizer") for r in group), excused=(),
    )  # fmt: skip
    later = _differences("step", half + 1, group, names, "float32[192, 256]")
    resume = dataclasses.replace(
        load, first=later[0], at_first=later, one="reference", other="resume",
        question="does the resumed run go on as it would have?", steps=(half + 1, steps), values=241 * ranks * half,
        cells=tuple((r, s, items + s, "master" if s == half + 1 else "loss")
                    for s in range(half + 1, steps + 1, max(1, steps // 100))
                    for r in (group if s == half + 1 else range(ranks))),
    )  # fmt: skip
    return dataclasses.replace(
        equal(),
        word="different",
        sentence=f"Right after loading, rank {group[0]} does not hold the 'optimizer exp_avg_sq ...' that was saved.",
        steps=steps,
        saved_at=(half,),
        facts=FACTS | {"world_size": ranks, "axes": {"tp": 8, "pp": 1, "dp": ranks // 8}},
        comparisons=(
            dataclasses.replace(repeats(), steps=(1, steps), ranks=ranks),
            dataclasses.replace(saves_alike(), steps=(1, half), ranks=ranks),
            load,
            resume,
        ),
        culprits=(Culprit("state", group[0], half, "optimizer exp_avg_sq", "restored alone, the run is equal"),),
        curves=curves(1e-5, half + 1, steps=steps),
    )


ALL = {
    "equal": equal, "state_fault": state_fault, "module_fault": module_fault, "not_deterministic": not_deterministic,
    "failed_arm": failed_arm, "many_ranks": many_ranks,
}  # fmt: skip
