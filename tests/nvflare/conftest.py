"""Tests against NVFlare's own filters; `.ci/nvflare` runs them in an environment of their own."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("nvflare") is None else []
