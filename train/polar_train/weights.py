"""Checkpoints: saved in Hugging Face format, and the probe by which one is known in an engine.

Invariant: a checkpoint folder appears whole or not at all and never replaces another; a probe holds an engine to what a
float32 forward of the checkpoint gives. It trains nothing and asks no engine (engines.py does).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedModel

from polar_train.errors import BadInput, PushFailed
from polar_train.model import load, token_logprobs

Float_T = npt.NDArray[np.float32]

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files of a model folder that hold weights, or an index of them; everything else describes the model."""
OWN_FILES = ("config.json", "train.json")
"""Files that a checkpoint gets from the trained model, not from the folder it started from."""

PROBE = (
    "The probe is one paragraph that every model reads the same way. A river rises in the hills, crosses a plain of "
    "fields and small towns, and reaches the sea after 214 kilometres. def area(r): return 3.14159 * r ** 2"
)
"""Text whose logprobs tell two sets of weights apart."""
TOLERANCE = 1e-3
"""Largest difference of a probe logprob between a float32 engine and a float32 forward of the checkpoint."""
ROUGH_TOLERANCE = 0.5
"""The same for an engine in half precision; SmolLM2-135M in bfloat16 is off by 0.21 at most, in float16 by 0.02."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text in a checkpoint's ids, and what the checkpoint makes of it."""

    ids_T: npt.NDArray[np.int32]
    expected_T: Float_T
    """Logprobs [T-1] of all ids but the first, in float32."""

    def disagreement(self, logprobs_T: Float_T) -> float:
        """Largest difference between these logprobs and the checkpoint's."""
        return float(np.abs(logprobs_T - self.expected_T).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a push did to one engine, as seen from outside."""

    url: str
    version_before: str
    version_after: str
    tensors: int
    """Tensors that the engine holds."""
    changed: int
    """Tensors that are not what they were."""
    tokens: int
    """Probe tokens compared."""
    disagreement: float
    """Largest |logprob(engine) - logprob(checkpoint)| after the push."""


def check_free(out: Path) -> None:
    """Raises BadInput when something lies where a checkpoint is to be written."""
    if out.exists():
        raise BadInput(f"{str(out)!r} exists and is not overwritten: give another --out, or remove it")


def save_checkpoint(model: PreTrainedModel, source: Path, out: Path, report: Mapping[str, object]) -> None:
    """Writes weights, config, the tokenizer files of `source` and train.json into `out`, which appears whole.

    Raises BadInput when `out` exists.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as holder:
        folder = Path(holder) / out.name
        write_model(model, source, folder)
        (folder / "train.json").write_text(json.dumps(report, indent=2) + "\n")
        folder.rename(out)  # fails on a folder with files in it, so that a checkpoint never replaces one


def write_model(
    model: PreTrainedModel, source: Path, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Writes a Hugging Face folder: the model's weights, or the `weights` given in their place, and its config, and the
    other files of `source`, such as those of the tokenizer.
    """
    model.save_pretrained(folder, state_dict=dict(weights) if weights else None)
    for file in source.iterdir():
        if file.is_file() and file.name not in OWN_FILES and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)


def probe_of(checkpoint: Path) -> Probe:
    """The probe of a checkpoint. Raises BadInput for one that does not load: it never reaches an engine."""
    ids_T = _probe_ids(checkpoint)
    return Probe(ids_T, checkpoint_logprobs(checkpoint, ids_T))


def check_probe(seen: Push, precision: str) -> None:
    """Raises PushFailed unless the engine's logprobs are the checkpoint's, as far as its precision allows."""
    tolerance = TOLERANCE if precision == "float32" else ROUGH_TOLERANCE
    if not seen.disagreement <= tolerance:
        raise PushFailed(
            f"its logprobs differ from the checkpoint's by {seen.disagreement:.2e}, more than {tolerance:.0e}: "
            f"it does not serve this checkpoint"
        )


def checkpoint_logprobs(checkpoint: Path, ids_T: npt.NDArray[np.int32]) -> Float_T:
    """Logprobs [T-1] that a float32 forward of a checkpoint gives to all ids but the first."""
    model = load(checkpoint).eval()
    input_ids_T = torch.tensor(ids_T, dtype=torch.int64, device=model.device)
    position_ids_T = torch.arange(len(ids_T), device=model.device)
    with torch.inference_mode():
        logprobs_L = token_logprobs(
            model, input_ids_T, position_ids_T, position_ids_T > 0, torch.ones(len(ids_T), device=model.device)
        )
    return logprobs_L.cpu().numpy()


def _probe_ids(checkpoint: Path) -> npt.NDArray[np.int32]:
    if not (checkpoint / "config.json").is_file():
        raise BadInput(f"no checkpoint at {str(checkpoint)!r}: give the folder that `polar-train step` wrote")
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:  # no tokenizer files: said as one sentence
        raise BadInput(f"the tokenizer of {str(checkpoint)!r} cannot be loaded: {error}") from error
    return np.array(tokenizer.encode(PROBE, add_special_tokens=False), dtype=np.int32)
