import sys

from speccascade_jax.commands import launch

launch(["benchmark", *sys.argv[1:]])
