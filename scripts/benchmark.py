import sys

from speccascade_jax.commands import main

sys.exit(main(["benchmark", *sys.argv[1:]]))
