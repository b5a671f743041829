import sys

from speccascade_jax.commands import launch

launch(["plan", *sys.argv[1:]])
