"""The tests of stats.py: python3 test_stats.py"""

from stats import median

assert median([9, 1, 5]) == 5
assert median([1, 2, 3, 10]) == 2.5
print("all well")
