"""Hypothesis without deadlines: on a busy machine the time of one example says nothing about an answer."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
