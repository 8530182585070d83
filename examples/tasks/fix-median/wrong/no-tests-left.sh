echo > test_stats.py
