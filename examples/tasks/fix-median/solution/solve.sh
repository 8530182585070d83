cat > stats.py <<'END'
def median(numbers):
    """The middle one of the numbers, or the mean of the middle two."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
END
