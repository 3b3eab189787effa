"""The part of a command line that says where a run starts, stops, saves and writes: Megatron-LM's flags, Bridge's overrides.

Names are those of megatron/training/arguments.py and megatron/training/config/training_config.py (megatron-core 0.19.2), and of
megatron/bridge/training/config.py (megatron-bridge 0.6.2). Both take the last of repeated settings, so what is added at the end
of a line wins over what stands in it. Pure: nothing of Megatron is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one launch has to do.

    Attributes:
        stop_at: The last step, counted as the run counts.
        scratch: A folder for all that the run writes besides checkpoints.
        save_to: Where checkpoints go; None: none are written.
        save_every: Steps between saves, if there are any.
        load_from: The checkpoint folder to resume from; None leaves the user's start as it is.
        load_step: Which of the steps saved there; None is the newest.
        load_older: It is not the newest.
        hidden: The user's arguments cannot be seen, so what may stand in them is overridden too.
    """

    stop_at: int
    scratch: str
    save_to: str | None = None
    save_every: int | None = None
    load_from: str | None = None
    load_step: int | None = None
    load_older: bool = False
    hidden: bool = False


class RunFlags(Protocol):
    """What is known of one framework's command line."""

    def refusals(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Settings with which no run can be resumed, each with its reason and the remedy."""

    def horizon(self, arguments: Sequence[str]) -> int | None:
        """Steps of the whole run; None if the arguments do not say."""

    def start(self, arguments: Sequence[str]) -> tuple[str | None, int | None]:
        """The checkpoint folder that the run starts from, and the step if one is named."""

    def added(self, arguments: Sequence[str], target: Target) -> tuple[str, ...]:
        """What to add at the end of the arguments."""

    def loading(self, arguments: Sequence[str], folder: str, step: int | None = None) -> tuple[str, ...]:
        """What makes a run start from the newest step in a folder, and end where there is none.

        Args:
            arguments: The script's own; what they say otherwise is overridden.
            folder: Where checkpoints are.
            step: That newest step, said only where the arguments name one.
        """

    def loading_local(self, folder: str) -> tuple[str, ...]:
        """What makes a run start from local checkpoints, one file per rank, in a folder. New ones are saved there too."""


def flag_value(arguments: Sequence[str], *names: str) -> str | None:
    """The last value of an argparse flag under any of its names; empty for one without a value; None if it is not there."""
    found = None
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        else:
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            found = "" if following.startswith("--") else following
    return found


def override_value(arguments: Sequence[str], name: str) -> str | None:
    """The last value of a Hydra override ``name=value`` (also ``+name=value``), without quotes; None if it is not there."""
    found = None
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals and key.lstrip("+") == name:
            found = value.strip("'\"")
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


_OTHER_RUN = "a resumed run would not be this run"
_LM_REFUSED = {
    "--finetune": "it loads weights only and begins again at iteration 0; name what the run starts from with"
    " --pretrained-checkpoint, which steps back once there is a checkpoint to resume",
    "--no-load-optim": f"without its optimizer {_OTHER_RUN}; name what the run starts from with --pretrained-checkpoint",
    "--no-load-rng": f"without its random number generators {_OTHER_RUN}; name what the run starts from with"
    " --pretrained-checkpoint",
    "--no-save-optim": f"the optimizer is not saved, and {_OTHER_RUN}; take it away",
    "--no-save-rng": f"the random number generators are not saved, and {_OTHER_RUN}; take it away",
    "--override-ckpt-iteration": f"it changes the iteration of what is loaded, and {_OTHER_RUN}; take it away",
    "--skip-train": "nothing is trained; take it away",
    "--ckpt-convert-format": "it converts a checkpoint instead of training; take it away",
    "--yaml-cfg": "it makes Megatron-LM read its settings from that file alone, so none can be added; give them as flags",
}
_LM_SAVE_INTERVAL = ("--save-interval", "--persistent-save-interval")
# Each of these writes into --save, or asserts that there is one, whether or not checkpoints are saved.
_LM_NEEDS_A_FOLDER = (
    "--log-progress", "--enable-ft-package", "--save-params-interval", "--save-activations-interval",
    "--save-tokens-per-expert-interval", "--save-wgrads-interval", "--save-dgrads-interval", "--moe-use-upcycling",
)  # fmt: skip
_LM_FOLDERS = {
    "--tensorboard-dir": "tensorboard",
    "--wandb-save-dir": "wandb",
    "--config-logger-dir": "config-logger",
    "--logits-save-dir": "logits",
    "--non-persistent-global-ckpt-dir": "non-persistent",
    "--non-persistent-local-ckpt-dir": "non-persistent-local",
}


class MegatronLM:
    """Megatron-LM's argparse flags."""

    def refusals(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Settings with which no run can be resumed, each with its reason and the remedy."""
        return tuple(f"{n}: {why}" for n, why in _LM_REFUSED.items() if flag_value(arguments, n) is not None)

    def horizon(self, arguments: Sequence[str]) -> int | None:
        """Steps of the whole run; with ``--train-samples`` only where the batch size is constant and named."""
        samples = _number(flag_value(arguments, "--train-samples"))
        batch = _number(flag_value(arguments, "--global-batch-size"))
        if samples and batch and flag_value(arguments, "--rampup-batch-size") is None:
            return samples // batch
        return _number(flag_value(arguments, "--train-iters"))

    def start(self, arguments: Sequence[str]) -> tuple[str | None, int | None]:
        """Value of ``--load`` and of ``--ckpt-step``."""
        return flag_value(arguments, "--load") or None, _number(flag_value(arguments, "--ckpt-step"))

    def added(self, arguments: Sequence[str], target: Target) -> tuple[str, ...]:
        """What to add at the end of the arguments.

        ``--exit-interval n`` ends the run after the first step that n divides, which is step n as long as the run starts
        before it, and saves there if ``--save`` is true (training.py, checkpoint_and_decide_exit). argparse cannot unset
        ``--save``, but an empty one is false wherever a save is decided.
        """

        def given(*names: str) -> bool:
            return flag_value(arguments, *names) is not None

        added = ["--exit-interval", str(target.stop_at)]
        folder, every = target.save_to, target.save_every or target.stop_at
        if folder is None and any(given(n) for n in _LM_NEEDS_A_FOLDER):
            folder = f"{target.scratch}/checkpoints"
        if folder is not None:
            added += ["--save", folder, "--save-interval", str(every)]
            added += ["--save-retain-interval", str(every)] if given("--save-retain-interval") else []
        elif target.hidden:
            added += ["--save=", "--save-interval", str(every)]
        elif given("--save"):
            added += ["--save="]
        if target.load_from is not None:
            says = ("--ckpt-step",) if target.hidden or target.load_older else ()
            added += self.loading((*arguments, *says), target.load_from, target.load_step)
        for name, folder_name in _LM_FOLDERS.items():
            if given(name) or (name == "--wandb-save-dir" and given("--wandb-project", "--wandb-exp-name")):
                added += [name, f"{target.scratch}/{folder_name}"]
        added += ["--non-persistent-save-interval", "0"] if given("--non-persistent-save-interval") else []
        return tuple(added)

    def loading(self, arguments: Sequence[str], folder: str, step: int | None = None) -> tuple[str, ...]:
        """``--load``; ``--ckpt-step`` would otherwise be looked for in the folder."""
        named = step is not None and flag_value(arguments, "--ckpt-step") is not None
        return ("--load", folder, "--exit-on-missing-checkpoint", *(("--ckpt-step", str(step)) if named else ()))

    def loading_local(self, folder: str) -> tuple[str, ...]:
        """The manager is made with this directory and no session (megatron/training/training.py, pretrain)."""
        return "--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", folder


_BRIDGE_REFUSED = {
    ("checkpoint.finetune", "true"): "it loads weights only and begins again at iteration 0; name"
    " what the run starts from with checkpoint.pretrained_checkpoint",
    ("checkpoint.load_optim", "false"): f"without its optimizer {_OTHER_RUN}; take it away",
    ("checkpoint.load_rng", "false"): f"without its random number generators {_OTHER_RUN}; take it away",
    ("checkpoint.save_optim", "false"): f"the optimizer is not saved, and {_OTHER_RUN}; take it away",
    ("checkpoint.save_rng", "false"): f"the random number generators are not saved, and {_OTHER_RUN}; take it away",
    ("train.skip_train", "true"): "nothing is trained; take it away",
    ("validation.skip_train", "true"): "nothing is trained; take it away",
}
_BRIDGE_NEEDS_A_FOLDER = (
    "logger.log_progress", "ft.enable_ft_package", "checkpoint.save_params_interval", "checkpoint.save_activations_interval",
    "checkpoint.save_tokens_per_expert_interval", "checkpoint.save_wgrads_interval", "checkpoint.save_dgrads_interval",
)  # fmt: skip
_BRIDGE_FOLDERS = {
    "logger.wandb_save_dir": "wandb",
    "checkpoint.non_persistent_global_ckpt_dir": "non-persistent",
    "checkpoint.non_persistent_local_ckpt_dir": "non-persistent-local",
    "tensor_inspect.log_dir": "tensor-inspect",
    "logger.save_config_filepath": "run_config.yaml",
}
_HYDRA_PLAIN = re.compile(r"[\w./\-+:@]+")


class Bridge:
    """Megatron-Bridge's Hydra overrides. What a recipe sets is not in the line, so more is overridden than stands there."""

    def refusals(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Settings with which no run can be resumed, each with its reason and the remedy."""
        return tuple(
            f"{name}={value}: {why}"
            for (name, value), why in _BRIDGE_REFUSED.items()
            if (override_value(arguments, name) or "").lower() == value
        )

    def horizon(self, arguments: Sequence[str]) -> int | None:
        """Steps of the whole run, where the line says so and not the recipe alone."""
        samples = _number(override_value(arguments, "train.train_samples"))
        batch = _number(override_value(arguments, "train.global_batch_size"))
        return samples // batch if samples and batch else _number(override_value(arguments, "train.train_iters"))

    def start(self, arguments: Sequence[str]) -> tuple[str | None, int | None]:
        """Values of ``checkpoint.load`` and ``checkpoint.ckpt_step``, where the line says so."""
        folder = override_value(arguments, "checkpoint.load")
        step = _number(override_value(arguments, "checkpoint.ckpt_step"))
        return (None if folder in (None, "", "null") else folder), step

    def added(self, arguments: Sequence[str], target: Target) -> tuple[str, ...]:
        """What to add at the end of the arguments.

        ``train.exit_interval`` is Megatron-LM's (bridge/training/train.py, checkpoint_and_decide_exit). ``async_save`` asserts
        that there is a ``save``. Recipes set a TensorBoard folder; the one way to write to none is to have none.
        """

        def given(name: str) -> bool:
            return override_value(arguments, name) not in (None, "null")

        added = [f"train.exit_interval={target.stop_at}", "logger.tensorboard_dir=null"]
        folder, every = target.save_to, target.save_every or target.stop_at
        if folder is None and any(given(n) for n in _BRIDGE_NEEDS_A_FOLDER):
            folder = f"{target.scratch}/checkpoints"
        if folder is not None:
            added += [f"checkpoint.save={_quoted(folder)}", f"checkpoint.save_interval={every}"]
            added += [f"checkpoint.save_retain_interval={every}"] if given("checkpoint.save_retain_interval") else []
        else:
            added += ["checkpoint.save=null", "checkpoint.async_save=false"]
        if target.load_from is not None:
            says = ("checkpoint.ckpt_step=0",) if target.load_older else ()
            added += self.loading((*arguments, *says), target.load_from, target.load_step)
        for name, folder_name in _BRIDGE_FOLDERS.items():
            if given(name) or (name == "logger.wandb_save_dir" and given("logger.wandb_project")):
                added += [f"{name}={_quoted(f'{target.scratch}/{folder_name}')}"]
        for name in ("logger.mlflow_experiment", "logger.comet_project"):
            added += [f"{name}=null"] if given(name) else []
        added += (
            ["checkpoint.non_persistent_save_interval=null"] if given("checkpoint.non_persistent_save_interval") else []
        )
        return tuple(added)

    def loading(self, arguments: Sequence[str], folder: str, step: int | None = None) -> tuple[str, ...]:
        """``checkpoint.load``; ``checkpoint.ckpt_step`` would otherwise be looked for in the folder."""
        added = [f"checkpoint.load={_quoted(folder)}", "checkpoint.exit_on_missing_checkpoint=true"]
        if step is not None and override_value(arguments, "checkpoint.ckpt_step") not in (None, "null"):
            added += [f"checkpoint.ckpt_step={step}"]
        return tuple(added)

    def loading_local(self, folder: str) -> tuple[str, ...]:
        """The manager is made with this directory and no session (bridge/training/checkpointing.py)."""
        return (
            "checkpoint.non_persistent_ckpt_type=local",
            f"checkpoint.non_persistent_local_ckpt_dir={_quoted(folder)}",
        )


def _quoted(path: str) -> str:
    """A value as Hydra's override grammar takes it."""
    return path if _HYDRA_PLAIN.fullmatch(path) else "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


FLAGS: Mapping[str, RunFlags] = {"megatron-lm": MegatronLM(), "bridge": Bridge()}
