import sys

from speccascade_jax.commands import launch

launch(["evaluate", *sys.argv[1:]])
