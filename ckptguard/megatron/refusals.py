"""Which stored args lead to no model that can be asked about; told before any process is started."""

from __future__ import annotations

from collections.abc import Mapping

from ckptguard.core.errors import UnsupportedError

# Without these there is no model to speak of; every Megatron-LM since 0.8 stores them.
_NEEDED = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "padded_vocab_size", "max_position_embeddings", "params_dtype", "transformer_impl",
)  # fmt: skip

# Settings that lead to files, or to layouts that GPTModelBuilder and HybridModelBuilder do not make.
_REFUSED: dict[str, str] = {
    "yaml_cfg": "the model is described by a YAML file that the checkpoint does not hold",
    "heterogeneous_layers_config_path": "heterogeneous layers are described by a file outside the checkpoint",
    "te_precision_config_file": "precision is described by a file outside the checkpoint",
    "kitchen_config_file": "it uses Kitchen, which is not public",
    "kitchen_recipe_number": "it uses Kitchen, which is not public",
    "use_megatron_fsdp": "Megatron-FSDP cuts tensors by data parallel rank",
    "use_torch_fsdp2": "FSDP2 cuts tensors by data parallel rank",
}
_DEFAULT_ONE = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")  # 0.19; sizes above 1 cut weights again

_TRUSTED_SPECS = ("megatron.core.", "ckptguard.testing.")


def refuse(given: Mapping[str, object]) -> None:
    """Raises if the model cannot be built from these args.

    Args:
        given: Training args as a checkpoint stores them.

    Raises:
        UnsupportedError: Args are missing, or ask for what is not in the checkpoint or not supported; names each.
    """
    if not given:
        raise UnsupportedError(
            "the checkpoint stores no training args, so Megatron cannot be asked about its model",
            next_step="Give a checkpoint that holds `args` in its common state or in mp_rank_*/model_optim_rng.pt.",
        )
    missing = [name for name in _NEEDED if given.get(name) is None]
    if missing:
        raise UnsupportedError(
            f"the stored args do not say {', '.join(missing)}; Megatron needs them to build the model"
        )
    for name, reason in _REFUSED.items():
        if given.get(name):
            raise UnsupportedError(f"the stored args have {name}={given[name]!r}: {reason}")
    for name in _DEFAULT_ONE:
        if (given.get(name) or 1) != 1:
            raise UnsupportedError(f"the stored args have {name}={given[name]}; only 1 is supported")
    spec = given.get("spec")
    words = [str(word) for word in spec] if isinstance(spec, list | tuple) else [str(spec)]
    if spec is not None and not words[0].startswith(_TRUSTED_SPECS):
        raise UnsupportedError(
            f"the stored args name the layer spec {'.'.join(words)}; only specs of megatron.core are imported",
            next_step="A spec is code, and a checkpoint is data from somewhere: it is not run on a checkpoint's word.",
        )
