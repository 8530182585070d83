#!/usr/bin/env bash
# Training on a CUDA machine: FlexAttention's tree against packed against per-request, and what bfloat16 costs.
# Needs no network and no installation: a Python with torch, transformers, numpy, pyarrow and rich, and this checkout.
#   benchmarks/gpu.sh [--cpu] [--out FILE] [--models 0.6B,4B]     ($PYTHON names another interpreter)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3) || {
  echo "gpu.sh: no Python found; set PYTHON to an interpreter that has torch" >&2
  exit 2
}
export PYTHONPATH="$root:$root/train:$root/toolkit${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cuda=$("$python" - <<'CHECK'
import importlib.util, sys
missing = [name for name in ("torch", "transformers", "numpy", "pyarrow", "rich") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu.sh: {sys.executable} lacks {', '.join(missing)}: install them, or set PYTHON to an interpreter that has them")
import torch, transformers
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    sys.exit(f"gpu.sh: transformers {transformers.__version__} is too old: 5.24 or later is needed")
seen = torch.cuda.is_available()
print(f"torch {torch.__version__}, transformers {transformers.__version__}", file=sys.stderr)
print(f"device: {torch.cuda.get_device_name() if seen else 'CPU'}", file=sys.stderr)
print("yes" if seen else "no")
CHECK
)
if [ "$cuda" = no ] && [[ " $* " != *" --cpu "* ]]; then
  echo "gpu.sh: torch sees no CUDA device: run this on a machine with one, or give --cpu for a small size on the CPU" >&2
  exit 2
fi
exec "$python" "$root/benchmarks/gpu.py" "$@"
