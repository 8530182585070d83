"""The mergers of other projects, each behind one small adapter, and this project's own behind the same.

None of their code is kept here: `make .peers/.ready` installs their published packages, and what cannot be imported
without hundreds of megabytes of dependencies is run from the installed file itself (installed.py).
"""
