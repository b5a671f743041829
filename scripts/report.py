import sys

from speccascade_jax.commands import launch

launch(["report", *sys.argv[1:]])
