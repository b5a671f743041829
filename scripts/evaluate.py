import sys

from speccascade_jax.commands import main

sys.exit(main(["evaluate", *sys.argv[1:]]))
