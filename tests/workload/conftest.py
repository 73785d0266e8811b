"""The same examples in every run, so that a failure is never a matter of luck; set HYPOTHESIS_PROFILE to explore."""

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
