"""One engine as a trainer steers it: the weights it holds, pause and continue, other weights, and logprobs.

Invariant: what answers while the engine is paused is kept apart from what does not. SGLang holds every /generate back
during a pause, so the weights of a paused engine are known by their checksums (/weights_checker), never by a sample.
Not here: several engines, and what follows from a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import numpy.typing as npt

from polar_train.errors import BadInput, PushFailed

TIMEOUT = httpx.Timeout(600, connect=10)
"""Loading weights is slow; an engine that is not there is known soon."""
LIMITS = httpx.Limits(max_keepalive_connections=0)
"""A connection a request: one that the engine closes while others still load would look like its death."""


@dataclass(frozen=True, slots=True)
class Held:
    """The weights that an engine holds."""

    version: str
    folder: str
    """Where it says that they came from."""
    checksums: Mapping[str, str]
    """Of each tensor of each of its parts, as the engine computes them: comparable between engines of one kind."""

    def changed(self, other: Held) -> int:
        """How many tensors differ."""
        return len(dict(self.checksums.items() ^ other.checksums.items()))

    def contradicts(self, other: Held) -> bool:
        """Whether two engines that name their tensors alike hold different weights."""
        return self.checksums.keys() == other.checksums.keys() and self.checksums != other.checksums


class Engine:
    """A running engine; `close` it. Its methods raise BadInput when it does not answer, PushFailed when it refuses."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT, limits=LIMITS, trust_env=False)

    def close(self) -> None:
        """Let go of its connections."""
        self._client.close()

    # ------------------------------------------------------------------------------------- also while it is paused

    def held(self) -> Held:
        """The weights it holds."""
        info = self._get("/model_info")
        shown = self._post("/weights_checker", {"action": "checksum"})
        sums = {
            f"{rank} {name}": checksum
            for rank, part in enumerate(shown["ranks"])
            for name, checksum in part["checksums"].items()
        }
        return Held(str(info["weight_version"]), str(info["model_path"]), sums)

    def precision(self) -> str:
        """The type in which it computes: "float32", or what else it was started with."""
        return str(self._get("/server_info").get("dtype"))

    def pause(self, mode: Literal["retract", "abort"]) -> None:
        """Stop sampling: requests are held to be computed anew ("retract"), or end as aborted ("abort")."""
        self._post("/pause_generation", {"mode": mode})

    def load(self, folder: str | Path, version: str) -> None:
        """Take other weights and forget what was computed with the old ones."""
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        answer = self._post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise PushFailed(f"it refused the weights: {answer.get('message')!r}")

    def resume(self) -> None:
        """Go on after a pause."""
        self._post("/continue_generation", {})

    # ------------------------------------------------------------------------------------- only while it is serving

    def logprobs(self, ids_T: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Logprobs [T-1] that it gives to all ids of a prompt but the first, at temperature 1."""
        body = {
            "input_ids": ids_T.tolist(),  # JSON knows no arrays; a probe is short
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        triples = self._post("/generate", body)["meta_info"]["input_token_logprobs"]
        if [triple[1] for triple in triples] != body["input_ids"]:
            raise PushFailed("it did not give logprobs for the probe's own ids: it is not an SGLang-compatible engine")
        return np.array([triple[0] for triple in triples[1:]], dtype=np.float32)

    def _get(self, path: str) -> dict[str, Any]:  # Any: an engine's JSON
        return self._answer(self._client.build_request("GET", path))

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:  # Any: an engine's JSON
        return self._answer(self._client.build_request("POST", path, json=body))

    def _answer(self, request: httpx.Request) -> dict[str, Any]:  # Any: an engine's JSON
        try:
            response = self._client.send(request)
        except httpx.TransportError as error:
            raise BadInput(f"no engine answers at {str(request.url)!r}: {error or type(error).__name__}") from error
        if response.is_error:
            raise PushFailed(f"it answered {request.url.path} with {response.status_code}: {response.text[:300]}")
        return response.json()
