"""One GRPO step in plain torch from the batches of polar-toolkit: python plain_torch_grpo.py BATCHES MODEL OUT."""

import sys
from pathlib import Path

import pyarrow.dataset as ds
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

COLUMNS = ["input_ids", "loss_mask", "old_logprobs", "advantages", "temperature", "loss_weight"]

batches, model_folder, out = (Path(argument) for argument in sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
loss_sum = 0.0
for row in ds.dataset(batches).to_batches(columns=[*COLUMNS, "lengths"], batch_size=1):  # reads as it goes
    cells = {name: torch.tensor(row[name][0].values.to_numpy()) for name in row.schema.names}
    lengths = cells["lengths"].tolist()  # a row packs whole trajectories, one after the other
    for ids, mask, old, advantage, temperature, weight in zip(
        *(cells[name].split(lengths) for name in COLUMNS), strict=True
    ):
        at = mask.nonzero()[:, 0]  # a token at t is predicted by the logits at t - 1
        logits = model(ids.long()[None], use_cache=False, logits_to_keep=at - 1).logits[0]
        logprobs = (logits / temperature[at, None]).log_softmax(-1).gather(1, ids.long()[at, None])[:, 0]
        ratio = (logprobs - old[at]).exp()
        gain = torch.minimum(ratio * advantage[at], ratio.clamp(0.8, 1.28) * advantage[at])
        loss = -(weight[at] * gain).sum()
        loss.backward()
        loss_sum += loss.item()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
optimizer.step()
model.save_pretrained(out)
AutoTokenizer.from_pretrained(model_folder).save_pretrained(out)
print(f"loss {loss_sum:.8g} gradient norm {norm:.8g}")
