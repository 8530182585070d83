"""The test bench for real harnesses: an engine that plays scripts, a network that goes nowhere, a real mitmdump."""
