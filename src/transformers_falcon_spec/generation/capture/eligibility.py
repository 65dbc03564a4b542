"""Which calls can be captured, in words where they cannot, and what makes captured work stale."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model_parts import autocast_type, is_spread
from ..packed_linear import AUTO
from ..sequence_batch import SequenceBatch
from ..text_limits import changes_with_length
from .scoring import obstacle_to

BUSY = "another captured call decodes with the target"
NO_MEMORY = "no memory is left for buffers of fixed size"
_ASKING = {"longcat_flash"}  # model types whose forward asks the host, whatever the options
_CAPTURED_WEIGHTS = {  # on the device of `tests/pretend`
    "bitsandbytes in 4 bits",
    "torchao's Int8WeightOnlyConfig",
    "GPTQModel's TorchLinear",
}
_BENIGN_HOOKS = ("transformers.utils.output_capturing", "transformers_falcon_spec")


def is_wanted(capture: bool | str, device: torch.device) -> bool:
    """Whether the option `capture` asks for the captured step on this device: by itself where work can be captured."""
    return capture is True or (capture == AUTO and device.type == "cuda")


def first_that_holds(reasons: Mapping[str, bool]) -> str | None:
    """The first of some reasons in words that holds; None if none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_not_captured(model: PreTrainedModel, form: str, num_processes: int, has_hooks: bool) -> str | None:
    """Why no call of this kind can be captured, in words; None if nothing is in the way."""
    reasons = {
        "several processes write the text together": num_processes > 1,
        "the target cannot read trees": form != "tree",
        "hooks may not fire in the target": not has_hooks,
    }
    return first_that_holds(reasons) or obstacle_in(model, "target")


def obstacle_in(model: PreTrainedModel, name: str) -> str | None:
    """Why reads of a whole model, of this name in the sentence, cannot be captured, in words; None if they can."""
    reasons = {
        f"the {name} asks the host which of its experts have tokens": model.config.model_type in _ASKING,
        f"the {name} is in train mode": model.training,
        "autocast is on": autocast_type(model) is not None,
        f"the {name}'s rotary frequencies depend on the length of the text": changes_with_length(
            model.config.get_text_config(decoder=True)
        ),
        f"the {name} is split over several devices (tensor parallel)": (getattr(model, "_tp_size", None) or 1) > 1,
    }
    return first_that_holds(reasons) or why_not_repeated(model, name)


def why_not_repeated(model: Any, name: str) -> str | None:
    """Why forwards of a model, of this name in the sentence, cannot be repeated, in words; None if they can."""
    if is_spread(model):
        return f"parts of the {name} are spread over several devices"

    quantised = how_quantised(model)
    if quantised is not None and quantised not in _CAPTURED_WEIGHTS:
        return f"the {name}'s weights are quantised by {quantised}, whose forwards were never captured"

    for path, part in model.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        modules = [str(getattr(hook, "__module__", "")) for hook in hooks]
        if hasattr(part, "_hf_hook") or not all(module.startswith(_BENIGN_HOOKS) for module in modules):
            return f"`{path or type(part).__name__}` of the {name} has a hook, which a replay would leave out"

    return None


def how_quantised(model: Any) -> str | None:
    """By what the weights of a model are quantised, in words; None where they are plain, or were unpacked."""
    quantizer = getattr(model, "hf_quantizer", None)
    config: Any = getattr(quantizer, "quantization_config", None)
    packed = getattr(quantizer, "packed_modules", None)  # of a GGUF file: empty where all was unpacked
    if quantizer is None or packed == {} or getattr(config, "dequantize", False):
        return None

    if getattr(config, "load_in_4bit", False):
        return "bitsandbytes in 4 bits"
    if hasattr(config, "quant_type"):
        return f"torchao's {type(config.quant_type).__name__}"

    kernels = {type(part).__name__ for part in model.modules() if type(part).__module__.startswith("gptqmodel.")}
    return "GPTQModel's " + " and ".join(sorted(kernels)) if kernels else type(config or quantizer).__name__


def why_host_chooses(batch: SequenceBatch) -> str | None:
    """Why tokens of a call must be chosen by the host, between two pieces of work; None if the device may."""
    if not batch.verifier.is_token_matching:
        return f'`verifier="{batch.verifier.name}"` accepts drafts'
    if batch.is_lockstep:
        return "processors or stopping criteria are shown all rows together"
    if batch.rows[0].keeps_scores:
        return "the call returns scores or logits"
    return obstacle_to(batch.processors, len(batch))


def kernels_key() -> tuple[Any, ...]:
    """The settings of the process by which PyTorch chooses kernels and their precision, which a capture freezes."""
    cuda: Any = torch.backends.cuda
    matmul = cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # where PyTorch has it, the older settings may not be asked
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        torch.get_float32_matmul_precision() if precision is None else precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        str(cuda.preferred_blas_library()),
    )
