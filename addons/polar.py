"""Intercept an agent harness: mitmdump -s addons/polar.py --set polar_engine=http://127.0.0.1:30000.

Everything is in the installed package; `mitmdump --options` lists the polar_* options.
"""

from polar_mitm.addon import Polar

addons = [Polar()]
