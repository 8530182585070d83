"""Asks the function `median` of the workspace for some medians, and compares what it says."""

import json
import subprocess
import sys

LISTS = [[4], [9, 1, 5], [1, 2, 3, 10], [3, 3, 3, 3], [-1.5, 0, 7, 100, 8], [2, 1]]
MEDIANS = [4, 5, 2.5, 3, 7, 1.5]
ASK = """
import json, sys
sys.path.insert(0, ".")
from stats import median
lists = json.load(sys.stdin)
print(json.dumps([[median(numbers), numbers] for numbers in lists]))
"""
asked = subprocess.run(
    [sys.executable, "-I", "-c", ASK], input=json.dumps(LISTS), capture_output=True, text=True, timeout=30, check=False
)
print(asked.stderr, file=sys.stderr)
try:
    said = json.loads(asked.stdout)
except ValueError:
    sys.exit("the function said nothing")
sys.exit(said != [[median, numbers] for median, numbers in zip(MEDIANS, LISTS, strict=True)])
