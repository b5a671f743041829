import sys

from speccascade_jax.commands import launch

launch(["load", *sys.argv[1:]])
