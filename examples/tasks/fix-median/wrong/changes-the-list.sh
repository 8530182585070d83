cat > stats.py <<'END'
def median(numbers):
    numbers.sort()
    half = len(numbers) // 2
    return numbers[half] if len(numbers) % 2 else (numbers[half - 1] + numbers[half]) / 2
END
