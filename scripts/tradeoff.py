import sys

from speccascade_jax.commands import launch

launch(["tradeoff", *sys.argv[1:]])
