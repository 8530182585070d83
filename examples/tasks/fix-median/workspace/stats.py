"""Figures about lists of numbers."""


def median(numbers):
    """The middle one of the numbers, or the mean of the middle two."""
    numbers.sort()
    return numbers[len(numbers) // 2]
