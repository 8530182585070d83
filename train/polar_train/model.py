"""A causal language model in float32, and the logprobs it gives to sampled tokens.

Invariant: `token_logprobs` is log_softmax(logits / temperature) with no token seeing another trajectory of its row, so
it is the number an engine recorded, up to rounding. It holds no optimiser and writes nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from polar_mitm.tokens.fingerprint import fingerprint
from polar_train.errors import BadInput


def load(folder: Path, device: torch.device | None = None) -> PreTrainedModel:
    """The model of a Hugging Face folder in float32, on the GPU if there is one.

    Raises BadInput when the folder holds no model, or one that drops activations at random (its logprobs could not be
    the engine's).
    """
    if not (folder / "config.json").is_file():
        raise BadInput(f"no model at {str(folder)!r}: a Hugging Face folder with a config.json is needed")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:  # missing or broken weights, unknown architecture
        told = " ".join(str(error).split())  # some of the library's messages are several lines
        raise BadInput(f"the model at {str(folder)!r} cannot be loaded: {told}; give another folder") from error
    dropped = {name: value for name, value in model.config.to_dict().items() if "drop" in name and value}
    if dropped:
        raise BadInput(f"the model at {str(folder)!r} uses dropout {dropped!r}: set it to 0 in its config.json")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the mapped file, see kv.load_model
    return model.to(device or default_device())  # pyright: ignore[reportArgumentType]  (transformers mistypes `to`)


def check_tokenizer(stated: str | None, *folders: Path | None) -> None:
    """Raises BadInput when a batch states the fingerprint of another tokenizer than one in the folders of models.

    A batch that states none, or a folder without a tokenizer, cannot be compared; None is no model.
    """
    for folder in filter(None, folders):
        own = _fingerprint(folder.resolve()) if stated else None
        if own and own != stated:
            raise BadInput(
                f"the batch was sampled with the tokenizer {stated!r}, and that of the model at {str(folder)!r} is "
                f"{own!r}: train the model that sampled it, beside a reference of its kind, or sample anew"
            )


@cache
def _fingerprint(folder: Path) -> str | None:
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        return fingerprint(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:  # broken files: said as one sentence
        raise BadInput(f"the tokenizer at {str(folder)!r} cannot be loaded: {error}") from error


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def token_logprobs(
    model: PreTrainedModel, input_ids_T: Tensor, position_ids_T: Tensor, loss_mask_T: Tensor, temperature_T: Tensor
) -> Tensor:
    """Logprobs [L] float32 of the L tokens under the mask, in their order, for one row of T tokens.

    Positions that restart at 0 are what separates packed trajectories; no attention mask may be given, not even one of
    ones, since transformers then stops looking at the positions. Only the states that predict a loss token go through
    the vocabulary projection.
    """
    loss_index_L = loss_mask_T.nonzero()[:, 0]
    logits_LV = model(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=loss_index_L - 1,
    ).logits[0]
    scaled_LV = logits_LV.float() / temperature_T[loss_index_L, None]
    return scaled_LV.log_softmax(-1).gather(1, input_ids_T[loss_index_L, None])[:, 0]


def score(logits_LV: Tensor, ids_L: Tensor, temperature_L: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [L] float32 of the tokens `ids_L` under logits / temperature, and entropies [L] in nats without grad."""
    logprobs_LV = (logits_LV.float() / temperature_L[:, None]).log_softmax(-1)
    apart_LV = logprobs_LV.detach()
    return logprobs_LV.gather(1, ids_L[:, None])[:, 0], -(apart_LV.exp() * apart_LV).sum(-1)


def packs(config: PreTrainedConfig) -> bool:
    """Whether trajectories of this model may share a row: every layer attends to all tokens before it.

    Linear attention would carry state from one trajectory into the next; sliding windows are left alone to be safe.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)
