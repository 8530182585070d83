"""What is done with harnesses besides running them: find their programs, build their images, check that they work."""
