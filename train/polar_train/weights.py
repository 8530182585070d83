"""Checkpoints: saved in Hugging Face format, pushed to an engine, and proven to be what it serves.

Invariant: a checkpoint folder appears whole or not at all and never replaces another; a push counts only when a probe
shows the engine's logprobs to be those of the checkpoint, and no longer those from before. It trains nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
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
PROBE_TOLERANCE = 1e-3
"""Largest difference of a probe logprob between the engine and a float32 forward of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Push:
    """What a push did, as seen from outside the engine."""

    version_before: str
    version_after: str
    tokens: int
    """Probe tokens compared."""
    disagreement: float
    """Largest |logprob(engine) - logprob(checkpoint)| after the push."""
    change: float
    """Largest |logprob(engine, after) - logprob(engine, before)|."""


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
        model.save_pretrained(folder)
        for file in source.iterdir():
            if file.is_file() and file.name not in OWN_FILES and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, folder / file.name)
        (folder / "train.json").write_text(json.dumps(report, indent=2) + "\n")
        folder.rename(out)  # fails on a folder with files in it, so that a checkpoint never replaces one


def push(checkpoint: Path, engine: str, version: str) -> Push:
    """Loads a checkpoint into an engine under a version and proves it by a probe.

    Raises BadInput for a checkpoint that does not load or an engine that does not answer, PushFailed when the engine
    refuses or the probe does not hold. The checkpoint is loaded here first: a broken one never reaches the engine.
    """
    probe_T = _probe_ids(checkpoint)
    expected_T = checkpoint_logprobs(checkpoint, probe_T)
    with httpx.Client(base_url=engine.rstrip("/"), timeout=600, trust_env=False) as client:
        version_before, before_T = _version(client), engine_logprobs(client, probe_T)
        body = {"model_path": str(checkpoint.resolve()), "weight_version": version, "flush_cache": True}
        answer = _post(client, "/update_weights_from_disk", body)
        if not answer.get("success"):
            raise PushFailed(f"the engine kept its old weights: {answer.get('message')!r}")
        version_after, after_T = _version(client), engine_logprobs(client, probe_T)
    seen = Push(
        version_before=version_before,
        version_after=version_after,
        tokens=len(expected_T),
        disagreement=float(np.abs(after_T - expected_T).max()),
        change=float(np.abs(after_T - before_T).max()),
    )
    check_probe(seen, version)
    return seen


def check_probe(seen: Push, version: str) -> None:
    """Raises PushFailed unless the engine names the version, agrees with the checkpoint, and changed."""
    if seen.version_after != version:
        raise PushFailed(f"the engine names its weights {seen.version_after!r} after the push, not {version!r}")
    if not seen.disagreement <= PROBE_TOLERANCE:
        raise PushFailed(
            f"the engine's logprobs differ from the checkpoint's by {seen.disagreement:.2e}, more than "
            f"{PROBE_TOLERANCE:.0e}: it does not serve this checkpoint"
        )
    if not seen.change > seen.disagreement:
        raise PushFailed(
            f"the push changed the engine's logprobs by {seen.change:.2e}, not more than the {seen.disagreement:.2e} "
            f"by which it differs from the checkpoint: the weights are the old ones, or equal to them"
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


def engine_logprobs(client: httpx.Client, ids_T: npt.NDArray[np.int32]) -> Float_T:
    """Logprobs [T-1] that an engine gives to all ids of a prompt but the first, at temperature 1."""
    body = {
        "input_ids": ids_T.tolist(),  # JSON knows no arrays; a probe is short
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    triples = _post(client, "/generate", body)["meta_info"]["input_token_logprobs"]
    if [triple[1] for triple in triples] != body["input_ids"]:
        raise PushFailed(
            "the engine did not give logprobs for the probe's own ids: it is not an SGLang-compatible engine"
        )
    return np.array([triple[0] for triple in triples[1:]], dtype=np.float32)


def _probe_ids(checkpoint: Path) -> npt.NDArray[np.int32]:
    if not (checkpoint / "config.json").is_file():
        raise BadInput(f"no checkpoint at {str(checkpoint)!r}: give the folder that `polar-train step` wrote")
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:  # no tokenizer files: said as one sentence
        raise BadInput(f"the tokenizer of {str(checkpoint)!r} cannot be loaded: {error}") from error
    return np.array(tokenizer.encode(PROBE, add_special_tokens=False), dtype=np.int32)


def _version(client: httpx.Client) -> str:
    return str(_answer(client, client.build_request("GET", "/model_info"))["weight_version"])


def _post(client: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, Any]:  # Any: an engine's JSON
    return _answer(client, client.build_request("POST", path, json=body))


def _answer(client: httpx.Client, request: httpx.Request) -> dict[str, Any]:  # Any: an engine's JSON
    try:
        response = client.send(request)
    except httpx.TransportError as error:
        raise BadInput(f"no engine answers at {str(request.url)!r}: {error or type(error).__name__}") from error
    if response.is_error:
        raise PushFailed(f"the engine answered {request.url.path} with {response.status_code}: {response.text[:300]}")
    return response.json()
