"""Did an arm do what it had to? What is wrong with it, in one sentence with the likely reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptguard.megatron.run_flags import flag_value, override_value
from ckptguard.resume.arm_lines import ArmLine
from ckptguard.resume.arm_logs import Said, signal_words
from ckptguard.resume.streams import Stream

_MISSING = "exit-on-missing-checkpoint' set ... exiting"  # printed by both frameworks, which then leave with code 0
_TRACKER = "latest_checkpointed_iteration.txt"
_EARLY_ENDS = {
    "--exit-duration-in-mins": "train.exit_duration_in_mins",
    "--phase-transition-iterations": "train.phase_transition_iterations",
    "--exit-signal-handler": "train.exit_signal_handler",
}


def stopped_problem(streams: Mapping[int, Stream], said: Said, why_stopped: str) -> str:
    """Of an arm that was stopped from here."""
    return f"{why_stopped}; {where(streams)}{_because(said)}"


def ended_problem(line: ArmLine, streams: Mapping[int, Stream], said: Said, code: int, log: str) -> str | None:
    """Of an arm that ended by itself; None if it did what it had to."""
    if code != 0:
        return _failed(line, streams, said, code)
    if _MISSING in log:
        return f"it did not find the checkpoint in {line.checkpoints}"
    return _recorded_problem(line, streams) or saved_problem(line)


def where(streams: Mapping[int, Stream]) -> str:
    """How far the ranks were."""
    steps = {rank: stream.step for rank, stream in streams.items()}
    known = [step for step in steps.values() if step is not None]
    if not known:
        return "no rank had recorded a step" if streams else "no rank had recorded anything"
    words = f"the last step recorded is {max(known)}"
    behind = {rank: step for rank, step in steps.items() if step != max(known)}
    if behind:
        rank, step = min(behind.items(), key=lambda item: (-1 if item[1] is None else item[1], item[0]))
        words += f" (rank {rank}: {'none' if step is None else step})"
    return words


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in words, the first few of many."""
    listed = sorted(numbers)
    words = ", ".join(str(number) for number in listed[:8]) + (", ..." if len(listed) > 8 else "")
    return f"rank{'s' if len(listed) > 1 else ''} {words}"


def _because(said: Said) -> str:
    return f": {said.error}" if said.error else ""


def _failed(line: ArmLine, streams: Mapping[int, Stream], said: Said, code: int) -> str:
    if code == 127:
        return f"{line.command[0]} could not be started{_because(said)}"
    if code > 128:
        return f"it was killed by {signal_words(code - 128)}; {where(streams)}{_because(said)}"
    if said.killed:
        number, local_rank = said.killed
        return f"local rank {local_rank} was killed by {signal_words(number)}; {where(streams)}"
    words = f"it ended with code {code}; {where(streams)}{_because(said)}"
    if said.error and re.search("unrecognized arguments|unexpected argument|no such option|OverridesError", said.error):
        words += f" (added were {' '.join(line.added)}: is --framework {line.framework} right?)"
    return words


def _recorded_problem(line: ArmLine, streams: Mapping[int, Stream]) -> str | None:
    """What the streams of an arm show that ended with code 0."""
    if not streams:
        return (
            "it ended with code 0, and no rank recorded anything: the variables did not reach the ranks (does something on the"
            " way set PYTHONPATH anew, or start python with -I, -E or -S?), or nothing was trained"
        )
    for rank, stream in streams.items():
        if stream.failures:
            return f"rank {rank}: {stream.failures[0]}"
        if stream.damaged:
            return f"{stream.path} is not a stream: was it written by two processes?"
    return (
        _world_problem(line, streams)
        or _start_problem(line, streams)
        or _end_problem(line, streams)
        or _saves_problem(line, streams)
        or _torn_problem(streams)
    )


def _world_problem(line: ArmLine, streams: Mapping[int, Stream]) -> str | None:
    worlds = {stream.facts["world_size"] for stream in streams.values() if "world_size" in stream.facts}
    world = max(worlds, default=len(streams))
    if len(worlds) > 1 or len(streams) > world:
        return f"ranks of several runs recorded into one folder, of {sorted(worlds)} processes"
    if line.world is not None and world != line.world:
        return f"{world} processes trained, and the line starts {line.world}"
    missing = set(range(world)) - set(streams)
    return f"{ranks(missing)} of {world} recorded nothing" if missing else None


def _start_problem(line: ArmLine, streams: Mapping[int, Stream]) -> str | None:
    starts = {rank: _started_at(line, stream) for rank, stream in streams.items()}
    silent = [rank for rank, step in starts.items() if step is None]
    if silent:
        return f"{ranks(silent)} recorded no state before the first step: training was never reached, or is not watched"
    found = set(starts.values())
    if found == {line.start}:
        return None
    if len(found) > 1:
        return f"ranks started at different steps: {', '.join(str(step) for step in sorted(found, key=str))}"
    (step,) = found
    if not line.loads:
        return f"it started at step {step}, not {line.start}: it loads a checkpoint that the line does not show"
    reason = (
        f": it did not find the checkpoint in {line.checkpoints}, or loaded it as one to finetune" if step == 0 else ""
    )
    return f"it resumed at step {step}, not {line.start}{reason}"


def _started_at(line: ArmLine, stream: Stream) -> int | None:
    """The step a rank started from; a plain loop need not tell of its beginning before its first step."""
    if stream.loaded is None and line.framework == "torch" and stream.steps:
        return stream.steps[0] - 1
    return stream.loaded


def _end_problem(line: ArmLine, streams: Mapping[int, Stream]) -> str | None:
    lasts = {rank: stream.step or 0 for rank, stream in streams.items()}
    furthest, nearest = max(lasts.values()), min(lasts.values())
    if furthest > line.end:
        return over_problem(line, furthest)
    if nearest == line.end:
        return None
    late = "" if furthest == nearest else f" ({ranks(r for r, step in lasts.items() if step == nearest)})"
    early = [
        flag
        for flag, override in _EARLY_ENDS.items()
        if flag_value(line.command, flag) is not None or override_value(line.command, override) is not None
    ]
    reason = f": the line has {', '.join(early)}" if early else ": did something in the script or its data end the run?"
    return f"it ended at step {nearest}, not {line.end}{late}{reason}"


def over_problem(line: ArmLine, step: int) -> str:
    """Of an arm that goes on after its last step."""
    doing = "stopping once it had loaded" if line.role == "load" else f"stopping after step {line.end}"
    reason = (
        f"did what was added ({' '.join(line.added)}) reach the trainer?" if line.added else "what tells it to stop?"
    )
    return f"it went on to step {step} instead of {doing}: {reason}"


def _saves_problem(line: ArmLine, streams: Mapping[int, Stream]) -> str | None:
    for rank, stream in streams.items():
        missing = [step for step in line.saves if step not in stream.saved]
        if not missing or (line.framework == "torch" and not stream.saved):  # such a loop need not tell its saves
            continue
        if not stream.saved:
            return f"nothing was saved; it had to save after step {missing[0]}"
        found = ", ".join(str(step) for step in stream.saved)
        return f"it saved after step {found}, not after step {missing[0]} (rank {rank})"
    return None


def _torn_problem(streams: Mapping[int, Stream]) -> str | None:
    torn = [rank for rank, stream in streams.items() if not stream.ended]
    if not torn:
        return None
    return f"{ranks(torn)} did not end in an orderly way, though the launcher ended with code 0: killed, or left by os._exit?"


def saved_problem(line: ArmLine) -> str | None:
    """What is wrong with what a saving arm left on disk; None for other arms."""
    if not line.saves:
        return None
    assert line.checkpoints is not None
    folder, last = Path(line.checkpoints), line.saves[-1]
    if line.elsewhere and not folder.is_dir():
        return None
    if not folder.is_dir() or not any(folder.iterdir()):
        return f"no checkpoint was written to {folder}"
    if line.framework == "torch":
        return None
    tracker = folder / _TRACKER
    if not tracker.is_file():
        return f"the checkpoint in {folder} has no {_TRACKER}: its save did not come to its end"
    told = tracker.read_text().strip()
    if told != str(last):
        return f"{tracker} says {told[:40]!r}, and step {last} had to be saved"
    iteration = folder / f"iter_{last:07d}"
    if not iteration.is_dir() or not any(iteration.iterdir()):
        return f"{tracker} says {last}, and {iteration} holds nothing"
    return None
