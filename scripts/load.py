import sys

from speccascade_jax.commands import main

sys.exit(main(["load", *sys.argv[1:]]))
