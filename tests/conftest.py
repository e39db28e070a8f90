"""What holds for all tests."""

import os

# Before PyTorch is loaded, whose threads would otherwise spin while they wait: two processes of tests on two cores then
# take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
