"""The model that learns: SmolLM2-135M-Instruct, given words for calling tools.

Its vocabulary keeps a few markers of source-code corpora that a chat never holds; five of them get the names of the
markers that tool calls are written with, and a chat template writes tools, calls and results with them. Their
embeddings, which no training ever moved apart, begin as the mean of the tokens that spell their names, at the usual
length. No other weight is changed: what the markers mean is learned in the supervised stage.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MARKERS = {
    "<gh_stars>": "<tool_call>",
    "<issue_start>": "</tool_call>",
    "<issue_comment>": "<tool_response>",
    "<issue_closed>": "</tool_response>",
    "<jupyter_start>": "<think>",
    "<jupyter_text>": "</think>",
}
TEMPLATE = """\
{%- set said = messages -%}
{%- set ns = namespace(system="") -%}
{%- if messages and messages[0].role == "system" -%}
{%- set ns.system = messages[0].content -%}{%- set said = messages[1:] -%}
{%- endif -%}
{{- "<|im_start|>system\\n" + ns.system -}}
{%- if tools -%}
{{- "\\n<tools>" -}}
{%- for tool in tools -%}{{- "\\n" + (tool | tojson) -}}{%- endfor -%}
{{- "\\n</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in said -%}
{%- if message.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" -}}
{%- if loop.last or loop.nextitem.role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
{%- elif message.role == "assistant" and message.tool_calls -%}
{{- "<|im_start|>assistant" -}}
{%- if message.content -%}{{- "\\n" + message.content -}}{%- endif -%}
{%- for call in message.tool_calls -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- else -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def with_tools(model: Path, out: Path) -> None:
    """A copy of the model's folder whose tokenizer and template know tool calls."""
    shutil.copytree(model, out)
    _spell(AutoTokenizer.from_pretrained(model), out)
    file = out / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in MARKERS:
            token["content"], token["special"] = MARKERS[token["content"]], False
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in MARKERS.items():
        vocabulary[new] = vocabulary.pop(old)
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["unk_token"] = "<empty_output>"  # a byte-level vocabulary knows everything; <|endoftext|> is asked for
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "chat_template.jinja").write_text(TEMPLATE)


@torch.no_grad()
def _spell(tokenizer, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    embeddings_VH = model.get_input_embeddings().weight
    usual = embeddings_VH.norm(dim=1).median()
    for old, new in MARKERS.items():
        spelled_H = embeddings_VH[tokenizer.encode(new, add_special_tokens=False)].mean(0)
        embeddings_VH[tokenizer.convert_tokens_to_ids(old)] = spelled_H * usual / spelled_H.norm()
    model.save_pretrained(out)
